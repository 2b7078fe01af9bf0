#include "record/meta_cache.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <unordered_map>

#include "base/no_warnings.h"
#include "base/python_hooks.h"
#include "base/tensors_of.h"
#include "record/eager_checks.h"
#include "record/meta_kernel.h"
#include "tensor/tensor_impl.h"

namespace torch_xla {

namespace {

std::atomic<uint64_t> misses{0};

std::unordered_map<Hash, MetaSetPtr, HashHasher>& table() {
  static auto* const t = new std::unordered_map<Hash, MetaSetPtr, HashHasher>();
  return *t;
}

at::Tensor meta_twin(const at::Tensor& t) {
  if (!t.defined() || (!is_xla(t) && t.dim() == 0)) {
    return t;
  }
  auto probe = at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type());
  if (is_xla(t) && t.storage_offset() != 0) {
    probe.unsafeGetTensorImpl()->set_storage_offset(t.storage_offset());
  }
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) {
    probe.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return probe;
}

// Kernels see neither autograd nor autocast, and no mode over functions, such as one that gives a default device.
class KernelsOnly {
 public:
  ~KernelsOnly() { at::impl::PythonTorchFunctionTLS::set_disabled_state(functions_); }
  KernelsOnly() {
    at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }

 private:
  const c10::impl::ExcludeDispatchKeyGuard keys_{c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                                                 c10::autocast_dispatch_keyset};
  const at::impl::TorchFunctionDisabledState functions_ = at::impl::PythonTorchFunctionTLS::get_disabled_state();
};

struct TooLarge {};

// Makes CPU tensors. Those of tensors that share memory share theirs.
class ProbeTensors {
 public:
  ProbeTensors(size_t limit, Fill fill) : limit_(limit), fill_(fill) {}

  at::Tensor operator()(const at::Tensor& t) {
    if (!t.defined() || !is_xla(t)) {
      return t;
    }
    const auto bytes =
        std::max(at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.element_size(), t.storage_offset()),
                 t.storage().nbytes());
    if (bytes > limit_) {
      throw TooLarge();
    }
    auto& memory = memory_[t.storage().unsafeGetStorageImpl()];
    if (!memory.defined()) {
      const auto count = static_cast<int64_t>((bytes + t.element_size() - 1) / t.element_size());
      memory = fill_ == Fill::Zeros ? zeros(bytes) : filled(count).to(t.scalar_type());
    }
    return at::empty({0}, at::TensorOptions().dtype(t.scalar_type()).device(at::kCPU))
        .set_(memory.storage(), t.storage_offset(), t.sizes(), t.strides());
  }

 private:
  static at::Tensor zeros(size_t bytes) {
    const auto options = at::TensorOptions().dtype(at::kByte).device(at::kCPU);
    const auto size = static_cast<int64_t>(bytes);
    if (bytes <= kSmall) {
      return at::zeros({size}, options);
    }
    auto* const pages = std::calloc(bytes, 1);  // those that no one touches take no memory
    if (pages == nullptr) {
      throw TooLarge();
    }
    return at::from_blob(pages, {size}, &std::free, options);
  }

  at::Tensor filled(int64_t count) const {
    const auto options = at::TensorOptions().dtype(at::kLong).device(at::kCPU);
    return fill_ == Fill::Ones ? at::ones({count}, options)
                               : at::arange(count, options).mul(2654435761).bitwise_right_shift(16).remainder(97);
  }

  const size_t limit_;
  const Fill fill_;
  std::unordered_map<const c10::StorageImpl*, at::Tensor> memory_;
};

template <class Probe>
c10::IValue probe_argument(const c10::IValue& v, Probe&& probe, c10::DeviceType device) {
  return v.isDevice() ? c10::Device(device) : v.isGenerator() ? c10::IValue() : with_tensors(v, probe);
}

void add_meta(MetaSet& set, const at::Tensor& t) {
  Meta m;
  if (t.defined()) {
    m.sizes.assign(t.sizes().begin(), t.sizes().end());
    m.strides.assign(t.strides().begin(), t.strides().end());
    m.offset = t.storage_offset();
    m.dtype = t.scalar_type();
  }
  set.metas.push_back(std::move(m));
}

void add_result(MetaSet& set, const c10::IValue& v) {
  if (v.isTensorList()) {
    const auto list = v.toTensorList();
    set.returns.push_back(static_cast<int32_t>(list.size()));
    for (const at::Tensor& t : list) {
      add_meta(set, t);
    }
  } else if (v.isInt()) {
    set.returns.push_back(MetaSet::kNumber);
    set.numbers.push_back(v.toInt());
    add_meta(set, at::Tensor());
  } else {
    TORCH_CHECK(v.isTensor(), "[record] an operator returned a ", v.tagKind(), " where a tensor was expected");
    set.returns.push_back(MetaSet::kTensor);
    add_meta(set, v.toTensor());
  }
}

// Whether the tensor at `position` is also another argument: `logical_and_(x, y)` arrives as `logical_and(x, y,
// out=x)`.
bool is_read(c10::ArrayRef<c10::IValue> arguments, size_t position) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (i != position && arguments[i].isTensor() && arguments[position].isTensor() &&
        arguments[i].toTensor().is_same(arguments[position].toTensor())) {
      return true;
    }
  }
  return false;
}

// What a kernel returned, and the probes of the arguments that it was called with.
struct KernelCall {
  torch::jit::Stack stack;
  std::vector<c10::IValue> probe_arguments;
};

// Runs the CPU kernel on probes of the arguments.
KernelCall call_on_cpu(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, size_t limit = kSmall,
                       Fill fill = Fill::Zeros) {
  torch::jit::Stack stack;
  ProbeTensors probes(limit, fill);
  const KernelsOnly kernels_only;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (info.kinds[i] == ArgKind::Generator) {  // of its own: the program's draws must not change
      stack.push_back(at::detail::createCPUGenerator());
    } else {
      stack.push_back(probe_argument(arguments[i], probes, c10::DeviceType::CPU));
    }
  }
  std::vector<c10::IValue> probe_arguments = stack;
  info.op.callBoxed(stack);
  return {std::move(stack), std::move(probe_arguments)};
}

// A Meta kernel does not know quantized types, and promises others.
void check_dtype_arguments(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  for (size_t i = 0; i < arguments.size(); ++i) {
    auto type = info.op.schema().arguments()[i].real_type();
    if (const auto optional = type->cast<c10::OptionalType>()) {
      type = optional->getElementType();
    }
    if (arguments[i].isInt() && type->kind() == c10::TypeKind::ScalarTypeType) {
      contiguous_meta({}, static_cast<at::ScalarType>(arguments[i].toInt()));  // raises where XLA lacks it
    }
  }
}

// Meta kernels give an out= tensor that they resize other strides than CPU kernels do, and do not know of CPU kernels
// that resize what they write in place, such as the state of an observer that starts without elements. Whether the CPU
// kernel told.
bool take_kernel_strides(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, std::vector<c10::IValue>& metas,
                         size_t limit) {
  if (info.seeded || !info.op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) {
    return false;  // it would draw from the CPU's generator
  }
  std::vector<c10::IValue> probes;
  try {
    probes = call_on_cpu(info, arguments, limit).probe_arguments;
  } catch (const TooLarge&) {
    return false;
  } catch (std::exception& error) {
    if (!refuses_call(error)) {
      throw;
    }
    return false;  // of the values that the probes have
  }
  for (const auto position : info.written) {
    if (!metas[position].isTensor() || !metas[position].toTensor().defined()) {
      continue;
    }
    const auto& probe = probes[position].toTensor();
    if (!info.is_out[position] || metas[position].toTensor().sizes() == probe.sizes()) {
      metas[position].toTensor().unsafeGetTensorImpl()->set_sizes_and_strides(probe.sizes(), probe.strides());
    }
  }
  return true;
}

// Whether an argument is an empty list of dimensions that stands for all, which not all Meta kernels know.
bool all_dims(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, size_t i) {
  const auto& declared = info.op.schema().arguments()[i];
  return arguments[i].isIntList() && arguments[i].toIntList().empty() && declared.N() == 1 &&
         declared.real_type()->kind() == c10::TypeKind::OptionalType;
}

// Which results a backward operator is asked for (`output_mask`, `grad_input_mask`); some Meta kernels promise them
// all.
void drop_masked_results(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, torch::jit::Stack& results) {
  const auto& declared = info.op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (declared[i].N() == static_cast<int32_t>(results.size()) && arguments[i].isBoolList()) {
      const auto mask = arguments[i].toBoolList();
      for (size_t r = 0; r < results.size(); ++r) {
        if (!mask[r] && results[r].isTensor()) {
          results[r] = at::Tensor();
        }
      }
    }
  }
}

// Of a view that nothing else is known of, the strides tell what it shows; they must be those of its first argument's
// memory.
void check_view(const OpInfo& info, const at::Tensor& viewed, const at::Tensor& result) {
  TORCH_CHECK(result.is_alias_of(viewed) && !result.is_conj() && !result.is_neg(), "[record ", info.name,
              "] got a result of its Meta kernel that is ",
              result.is_alias_of(viewed) ? "a conjugate or a negative" : "no view of its first argument",
              ", expected a view of it by strides; declare the operator as one that returns a new tensor");
}

void check_views(const OpInfo& info, const std::vector<c10::IValue>& probes, const torch::jit::Stack& results) {
  for (const auto& v : results) {
    if (v.isTensor()) {
      check_view(info, probes[0].toTensor(), v.toTensor());
    } else if (v.isTensorList()) {
      for (const at::Tensor& t : v.toTensorList()) {
        check_view(info, probes[0].toTensor(), t);
      }
    }
  }
}

void remember_metas(const Hash& key, const MetaSetPtr& metas) {
  constexpr size_t kCapacity = size_t{1} << 16;  // a program of ever new shapes must not grow for ever
  if (table().size() >= kCapacity) {
    table().clear();
  }
  table().emplace(key, metas);
}

// The metas of a call that a kernel accepted, under `key`; null where only a call with the values tells them.
MetaSetPtr cache_metas(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, const Hash& key, KernelCall call) {
  bool resizes = false;
  bool grows = false;  // what is no out= argument
  bool warns = false;
  for (const auto position : info.written) {
    const auto& v = arguments[position];
    if (!v.isTensor() || !v.toTensor().defined()) {
      continue;
    }
    const bool differs = call.probe_arguments[position].toTensor().sizes() != v.toTensor().sizes();
    if (info.is_out[position]) {
      resizes = resizes || differs;
      warns = warns || (differs && v.toTensor().numel() != 0);
    } else if (!differs && v.toTensor().numel() == 0 && !is_aten(info) &&
               info.op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) {
      return {};  // zeros may not be what an operator of others takes
    } else {
      grows = grows || differs || v.toTensor().numel() == 0;
    }
  }
  grows = grows && is_aten(info);
  const bool layouts_taken =
      (resizes || grows) && take_kernel_strides(info, arguments, call.probe_arguments, grows ? kAnySize : kSmall);
  for (const auto position : info.written) {
    // Some Meta kernels resize what is also read, which no CPU kernel does.
    const auto& v = arguments[position];
    TORCH_CHECK((info.is_out[position] ? !is_read(arguments, position) : layouts_taken || !is_aten(info)) ||
                    !v.isTensor() || !v.toTensor().defined() ||
                    call.probe_arguments[position].toTensor().sizes() == v.toTensor().sizes(),
                "output with shape ", v.toTensor().sizes(), " doesn't match the broadcast shape ",
                call.probe_arguments[position].toTensor().sizes());
  }
  auto set = c10::make_intrusive<MetaSet>();
  set->validated_magnitude = raise_if_refused(info, arguments, call.stack);
  for (size_t r = 0; r < call.stack.size(); ++r) {
    if (info.return_writes[r] < 0) {
      add_result(*set, call.stack[r]);
    }
  }
  for (const auto position : info.written) {
    const auto& v = call.probe_arguments[position];
    if (!v.isNone()) {
      add_result(*set, v);
    }
  }
  set->rehash();
  if (!warns) {  // PyTorch warns of a resized tensor at every call
    const RecorderLock lock;
    remember_metas(key, set);
    note_validated_numbers(info, arguments, key, set->validated_magnitude);
  }
  return set;
}

}  // namespace

const MetaSetPtr* find_metas(const Hash& key) {
  const auto it = table().find(key);
  return it == table().end() ? nullptr : &it->second;
}

MetaSetPtr infer_metas(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, const Hash& key) {
  misses.fetch_add(1, std::memory_order_relaxed);
  check_dtype_arguments(info, arguments);
  torch::jit::Stack stack;
  stack.reserve(arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    stack.push_back(all_dims(info, arguments, i) ? c10::IValue()
                                                 : probe_argument(arguments[i], &meta_twin, c10::DeviceType::Meta));
  }
  std::vector<c10::IValue> probe_arguments(stack.begin(), stack.end());
  {
    const KernelsOnly kernels_only;
    try {
      call_meta_kernel(info, stack);
    } catch (const c10::NotImplementedError&) {
      if (!info.only_writes_inputs()) {
        throw;
      }
      stack.clear();  // no Meta kernel is needed: what it writes keeps its shape
    }
    drop_masked_results(info, arguments, stack);
  }
  if (info.view && info.inverse == Inverse::Memory && info.form == Form::Plain) {
    check_views(info, probe_arguments, stack);
  }
  return cache_metas(info, arguments, key, {std::move(stack), std::move(probe_arguments)});
}

void warn_and_raise_as_cpu(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, size_t bytes, Fill fill) {
  try {
    call_on_cpu(info, arguments, bytes, fill);
  } catch (const TooLarge&) {
  }
}

void raise_as_cpu(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, size_t bytes, Fill fill) {
  const NoWarnings silence;  // what is recorded warns by itself
  warn_and_raise_as_cpu(info, arguments, bytes, fill);
}

MetaSetPtr infer_metas_as_cpu(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, const Hash& key) {
  try {
    const NoWarnings silence;
    auto call = call_on_cpu(info, arguments);
    // Zeros have no imaginary part that could be lost in what is written.
    const auto is_complex = [](const c10::IValue& v) {
      return v.isTensor() && v.toTensor().defined() && v.toTensor().is_complex();
    };
    const bool loses =
        std::any_of(arguments.begin(), arguments.end(), is_complex) &&
        (info.written.empty() || !std::all_of(info.written.begin(), info.written.end(),
                                              [&](auto position) { return is_complex(arguments[position]); }));
    return info.view || info.seeded || loses ? MetaSetPtr() : cache_metas(info, arguments, key, std::move(call));
  } catch (const TooLarge&) {
    return {};
  }
}

uint64_t shape_cache_misses() { return misses.load(std::memory_order_relaxed); }

}  // namespace torch_xla
