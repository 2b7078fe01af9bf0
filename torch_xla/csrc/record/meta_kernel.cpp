#include "record/meta_kernel.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/native/GroupedMMUtils.h>

#include <list>
#include <string_view>
#include <unordered_map>

#include "base/no_warnings.h"

namespace torch_xla {

namespace {

using at::Tensor;
using Arguments = c10::ArrayRef<c10::IValue>;

const auto& kernels_of(const c10::OperatorHandle& handle);
// The dispatcher keeps kernels that were replaced, but has no function that gives them: a private member's name may be
// written in an explicit instantiation.
template <auto Definition, auto Kernels>
struct PrivateMember {
  friend const auto& kernels_of(const c10::OperatorHandle& handle) { return ((handle.*Definition)->op).*Kernels; }
};
template struct PrivateMember<&c10::OperatorHandle::operatorDef_, &c10::impl::OperatorEntry::kernels_>;

const c10::KernelFunction* kernel_of_aten(const OpInfo& info) {
  const auto& kernels = kernels_of(info.op);
  const auto it = kernels.find(c10::DispatchKey::Meta);
  if (it == kernels.end() || it->second.size() != 2) {
    return nullptr;
  }
  const auto& over = it->second.front().debug;
  return over.find("_meta_registrations.py") == std::string::npos ? nullptr : &it->second.back().kernel;
}

// Whether a tensor is in order, and computed with in its own type.
bool is_plain(const c10::IValue& v) {
  return v.isTensor() && v.toTensor().defined() && v.toTensor().is_contiguous() &&
         (v.toTensor().scalar_type() == at::kFloat || v.toTensor().scalar_type() == at::kDouble);
}

bool is_plain_like(const c10::IValue& v, const Tensor& x, c10::IntArrayRef sizes) {
  return is_plain(v) && v.toTensor().scalar_type() == x.scalar_type() && v.toTensor().sizes() == sizes;
}

Tensor shaped(const Tensor& like, c10::IntArrayRef sizes) { return at::detail::empty_meta(sizes, like.scalar_type()); }

using Results = std::optional<torch::jit::Stack>;

Results linear_shape(Arguments a) {
  if (!is_plain(a[0]) || !is_plain(a[1])) {
    return {};
  }
  const auto &x = a[0].toTensor(), &weight = a[1].toTensor();
  if (x.dim() == 0 || weight.dim() != 2 || !is_plain_like(a[1], x, {weight.size(0), x.size(-1)}) ||
      !(a[2].isNone() || is_plain_like(a[2], x, {weight.size(0)}))) {
    return {};
  }
  auto sizes = x.sizes().vec();
  sizes.back() = weight.size(0);
  return torch::jit::Stack{shaped(x, sizes)};
}

// Whether what is normalized are the last dimensions of `x`, and what scales and shifts them fits.
bool normalizes(const c10::IValue& x, const c10::IValue& shape, const c10::IValue& weight, const c10::IValue& bias) {
  if (!is_plain(x)) {
    return false;
  }
  const auto& t = x.toTensor();
  const auto sizes = shape.toIntVector();
  const auto fits = [&](const c10::IValue& v) { return v.isNone() || is_plain_like(v, t, sizes); };
  return !sizes.empty() && sizes.size() <= static_cast<size_t>(t.dim()) &&
         t.sizes().slice(t.dim() - sizes.size()) == c10::IntArrayRef(sizes) && fits(weight) && fits(bias);
}

std::vector<int64_t> statistics(const c10::IValue& x, const c10::IValue& shape) {
  auto sizes = x.toTensor().sizes().vec();
  std::fill(sizes.end() - static_cast<int64_t>(shape.toIntVector().size()), sizes.end(), 1);
  return sizes;
}

Results layer_norm_shape(Arguments a) {
  if (!normalizes(a[0], a[1], a[2], a[3])) {
    return {};
  }
  const auto& x = a[0].toTensor();
  const auto sizes = statistics(a[0], a[1]);
  return torch::jit::Stack{shaped(x, x.sizes()), shaped(x, sizes), shaped(x, sizes)};
}

Results layer_norm_backward_shape(Arguments a) {
  if (!normalizes(a[1], a[2], a[5], a[6])) {
    return {};
  }
  const auto& x = a[1].toTensor();
  const auto sizes = statistics(a[1], a[2]);
  if (!is_plain_like(a[0], x, x.sizes()) || !is_plain_like(a[3], x, sizes) || !is_plain_like(a[4], x, sizes) ||
      a[5].isNone() || a[6].isNone()) {
    return {};
  }
  return torch::jit::Stack{shaped(x, x.sizes()), shaped(x, a[5].toTensor().sizes()),
                           shaped(x, a[6].toTensor().sizes())};
}

// Checked as by the CPU kernel, and shaped: PyTorch's Meta kernel takes bfloat16 only.
Results grouped_product_shape(Arguments a) {
  const auto &x = a[0].toTensor(), &y = a[1].toTensor();
  const auto ends = a[2].toOptional<Tensor>();
  const auto out_dtype = a[4].toOptional<at::ScalarType>();
  at::native::_grouped_mm_validate_inputs(x, y, ends, a[3].toOptional<Tensor>(), out_dtype);
  const auto type = at::native::_resolve_grouped_mm_out_dtype(x, y, out_dtype);
  const auto out = at::native::create_grouped_gemm_output_tensor(x, y, ends, type);
  return torch::jit::Stack{at::detail::empty_meta(out.sizes(), type)};
}

// ATen's function says one dimension without elements.
Results number_in_shape(Arguments /*arguments*/) { return torch::jit::Stack{at::detail::empty_meta({}, at::kBool)}; }

// What PyTorch says wrongly; and what nearly each model calls, and it has in Python alone: for calls that no kernel can
// refuse, but the last.
Results shape_of(const OpInfo& info, Arguments arguments) {
  static const auto* const functions = new std::unordered_map<std::string, Results (*)(Arguments)>{
      {"aten.isin.Scalar_Tensor", &number_in_shape},
      {"aten.linear.default", &linear_shape},
      {"aten.native_layer_norm.default", &layer_norm_shape},
      {"aten.native_layer_norm_backward.default", &layer_norm_backward_shape},
      {"aten._grouped_mm.default", &grouped_product_shape},
  };
  const auto it = functions->find(info.name);
  return it == functions->end() ? Results() : it->second(arguments);
}

// A CPU tensor without elements that is broadcast and promoted as `t` is.
Tensor empty_probe(const Tensor& t) {
  if (!t.defined() || !t.is_meta()) {
    return t;
  }
  std::vector<int64_t> sizes;
  for (const auto size : t.sizes()) {
    sizes.push_back(size == 1 ? 1 : 0);
  }
  auto twin = at::empty(sizes, at::TensorOptions().dtype(t.scalar_type()).device(at::kCPU));
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) {
    twin.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return twin;
}

// What the CPU kernel of an operator that goes element by element gives for such tensors; null where it refuses them.
Results call_on_empty(const OpInfo& info, Arguments arguments) {
  torch::jit::Stack stack;
  for (const auto& v : arguments) {
    stack.push_back(v.isTensor() ? empty_probe(v.toTensor()) : v.isDevice() ? c10::Device(c10::kCPU) : v);
  }
  try {
    const NoWarnings silence;
    info.op.callBoxed(stack);
  } catch (const c10::Error&) {
    return {};  // that is looked at elsewhere
  }
  return stack;
}

// The sizes that tensors in order are broadcast to; null where they are not, or nothing else tells the result's layout.
std::optional<std::vector<int64_t>> broadcast(const OpInfo& info, Arguments arguments) {
  std::vector<int64_t> sizes;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& v = arguments[i];
    if (!v.isTensor()) {
      if (!(v.isNone() || v.isBool() || info.kinds[i] == ArgKind::Number)) {
        return {};
      }
      continue;
    }
    if (!v.toTensor().defined() || !v.toTensor().is_contiguous() || !at::are_expandable(sizes, v.toTensor().sizes())) {
      return {};
    }
    sizes = at::infer_size(sizes, v.toTensor().sizes());
  }
  return sizes;
}

bool is_hollow(const Tensor& t, c10::IntArrayRef sizes) {
  return t.defined() && t.layout() == at::kStrided && !t.is_conj() && !t.is_neg() &&
         std::equal(sizes.begin(), sizes.end(), t.sizes().begin(), t.sizes().end(),
                    [](int64_t size, int64_t hollow) { return hollow == (size == 1 ? 1 : 0); });
}

void take_dtypes(const OpInfo& info, const torch::jit::Stack& hollow, torch::jit::Stack& results) {
  for (size_t r = 0; r < results.size(); ++r) {
    const bool comparable = info.return_writes[r] < 0 && results[r].isTensor() && hollow[r].isTensor() &&
                            results[r].toTensor().defined() && hollow[r].toTensor().defined();
    if (comparable && results[r].toTensor().scalar_type() != hollow[r].toTensor().scalar_type()) {
      results[r] = results[r].toTensor().to(hollow[r].toTensor().scalar_type());
    }
  }
}

}  // namespace

bool is_aten(const OpInfo& info) { return info.name.rfind("aten.", 0) == 0; }

void call_meta_kernel(const OpInfo& info, torch::jit::Stack& stack) {
  if (auto shapes = shape_of(info, stack)) {
    stack = std::move(*shapes);
    return;
  }
  if (const auto* const kernel = kernel_of_aten(info)) {
    auto results = stack;
    try {
      kernel->callBoxed(info.op, c10::DispatchKeySet(c10::DispatchKey::Meta), &results);
      stack = std::move(results);
      return;
    } catch (const c10::NotImplementedError&) {  // for a type that it lacks
    }
  }
  const bool by_element = info.op.hasTag(at::Tag::pointwise) && !info.seeded && !info.view && is_aten(info) &&
                          info.op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
  if (!by_element) {
    info.op.callBoxed(stack);
    return;
  }
  const auto hollow = call_on_empty(info, stack);
  if (hollow && info.written.empty() && hollow->size() == 1 && hollow->front().isTensor()) {
    const auto sizes = broadcast(info, stack);
    if (const auto& result = hollow->front().toTensor(); sizes && is_hollow(result, *sizes)) {
      stack.assign(1, shaped(result, *sizes));
      return;
    }
  }
  info.op.callBoxed(stack);
  if (hollow) {
    take_dtypes(info, *hollow, stack);
  }
}

}  // namespace torch_xla
