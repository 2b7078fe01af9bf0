#include "run/host_kernel.h"

#if __has_include(<xla/ffi/api/ffi.h>)
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <xla/ffi/api/ffi.h>

#include "run/ffi_values.h"
#include "run/host_operators.h"
#include "run/kernel_thread.h"

namespace torch_xla {

namespace {

namespace ffi = xla::ffi;
using Numbers = FfiNumbers;

// An argument that is no tensor; an optional one that is not there is None.
c10::IValue constant(const c10::Type& type, const ffi::Dictionary& attributes, const std::string& name) {
  switch (type.kind()) {
    case c10::TypeKind::OptionalType:
      return attributes.contains(name) ? constant(*type.containedType(0), attributes, name) : c10::IValue();
    case c10::TypeKind::IntType:
      return ffi_attribute<int64_t>(attributes, name);
    case c10::TypeKind::FloatType:
      return ffi_attribute<double>(attributes, name);
    case c10::TypeKind::BoolType:
      return ffi_attribute<bool>(attributes, name);
    case c10::TypeKind::ListType: {
      const auto numbers = ffi_attribute<Numbers>(attributes, name);
      if (type.containedType(0)->kind() == c10::TypeKind::BoolType) {
        c10::List<bool> flags;
        for (const auto number : numbers) {
          flags.push_back(number != 0);
        }
        return flags;
      }
      return std::vector<int64_t>(numbers.begin(), numbers.end());
    }
    default:
      TORCH_CHECK(false, "[host kernel] got argument ", name, " of type ", type.str(), ", which has no attribute");
  }
}

bool is_tensor(const c10::Type& type) {
  return type.kind() == c10::TypeKind::TensorType ||
         (type.kind() == c10::TypeKind::OptionalType && is_tensor(*type.containedType(0)));
}

// A program refuses no index: a gradient whose place is nowhere is dropped, as the rule of the operator does.
void zero_out_of_range(const std::string& name, torch::jit::Stack& stack) {
  if (stays_in_bounds(name, stack)) {
    return;
  }
  constexpr size_t kGradient = 0, kInput = 1, kIndices = 7;  // of `max_pool2d_with_indices_backward` and that of 3d
  TORCH_CHECK(name.rfind("aten.max_pool", 0) == 0, "[host kernel] ", name, " got indices out of range");
  const auto sizes = stack[kInput].toTensor().sizes().slice(stack[kInput].toTensor().dim() - (name[13] - '0'));
  const auto& indices = stack[kIndices].toTensor();
  const auto stray = indices.lt(0).logical_or(indices.ge(c10::multiply_integers(sizes)));
  stack[kGradient] = stack[kGradient].toTensor().masked_fill(stray, 0);
  stack[kIndices] = indices.masked_fill(stray, 0);
}

void run_kernel(ffi::RemainingArgs& operands, ffi::RemainingRets& results, const ffi::Dictionary& attributes) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(ffi_text(attributes, "_name").c_str(),
                                                                 ffi_text(attributes, "_overload").c_str());
  const auto operand = ffi_attribute<Numbers>(attributes, "_operands"),
             result = ffi_attribute<Numbers>(attributes, "_results");

  const auto result_at = [&](int64_t slot) { return tensor_at(*results.get<ffi::AnyBuffer>(slot).value()); };

  torch::jit::Stack stack;
  size_t tensors = 0, written = 0;
  for (const auto& argument : op.schema().arguments()) {
    if (!is_tensor(*argument.type())) {
      stack.push_back(constant(*argument.type(), attributes, argument.name()));
    } else if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) {
      stack.push_back(result_at(result[written++]));
    } else {
      const auto slot = operand[tensors++];
      stack.push_back(slot < 0 ? c10::IValue() : c10::IValue(tensor_at(operands.get<ffi::AnyBuffer>(slot).value())));
    }
  }
  zero_out_of_range("aten." + op.schema().name().substr(6) + ".default", stack);
  // Kept alive: PyTorch 2.11 gives references to `out=` tensors after it has taken them off the stack.
  const torch::jit::Stack arguments_before = stack;
  op.callBoxed(stack);
  for (size_t i = written; i < stack.size(); ++i) {
    if (result[i] < 0) {
      continue;
    }
    const auto& computed = stack[i].toTensor();
    const auto to = result_at(result[i]);
    TORCH_CHECK(computed.sizes() == to.sizes(), "[host kernel] ", op.schema().name(), " gave sizes ", computed.sizes(),
                ", expected ", to.sizes());
    to.copy_(computed);
  }
}

ffi::Error call_kernel(ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes) {
  const auto work = [&] {
    const c10::InferenceMode guard;  // such a thread has autograd switched on
    run_kernel(operands, results, attributes);
  };
  try {
    if (ffi_attribute<bool>(attributes, "_parallel")) {
      start_in_kernel_thread(work).get();
    } else {
      const SingleThreaded single_threaded;
      work();
    }
    return ffi::Error::Success();
  } catch (const c10::Error& error) {
    return ffi::Error::Internal(error.what_without_backtrace());
  } catch (const std::exception& error) {
    return ffi::Error::Internal(error.what());
  } catch (...) {  // XLA calls this through C, which nothing may be thrown through
    return ffi::Error::Internal("[host kernel] a kernel threw something that is no std::exception");
  }
}

XLA_FFI_DEFINE_HANDLER(kHostKernel, call_kernel, ffi::Ffi::Bind().RemainingArgs().RemainingRets().Attrs());

}  // namespace

py::object host_kernel_target() { return py::capsule(reinterpret_cast<void*>(kHostKernel), "xla._CUSTOM_CALL_TARGET"); }

}  // namespace torch_xla

#else

namespace torch_xla {

py::object host_kernel_target() { return py::none(); }

}  // namespace torch_xla

#endif
