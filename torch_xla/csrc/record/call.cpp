#include "record/call.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include "base/python_hooks.h"
#include "base/tensors_of.h"
#include "device/device.h"
#include "tensor/placement.h"
#include "tensor/tensor_impl.h"

namespace torch_xla {

using c10::IValue;

namespace {

// A Python number that came as a tensor; read without a call of PyTorch's.
IValue number_of(const at::Tensor& t) {
  switch (t.scalar_type()) {
    case at::kDouble:
      return *t.const_data_ptr<double>();
    case at::kLong:
      return *t.const_data_ptr<int64_t>();
    case at::kBool:
      return *t.const_data_ptr<bool>();
    case at::kComplexDouble:
      return *t.const_data_ptr<c10::complex<double>>();
    default:
      return t.item();
  }
}

[[noreturn]] void throw_other_device(c10::Device one, c10::Device other) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", one, " and ",
              other, "!");
}

}  // namespace

void Call::find_device() {
  for (size_t i = 0; i < info.kinds.size(); ++i) {
    const auto& v = arguments[i];
    if (info.kinds[i] == ArgKind::Tensor) {
      if (v.isTensor()) {
        note(v.toTensor(), info.aliased[i]);
      }
    } else if (info.kinds[i] == ArgKind::TensorList && v.isTensorList()) {
      for (const at::Tensor& t : v.toTensorList()) {
        note(t, info.aliased[i]);
      }
    } else if (info.kinds[i] == ArgKind::OptTensorList && v.isList()) {
      const auto indexed = arguments[0].toTensor().device();
      for (const auto& e : v.toListRef()) {  // those on the host may come along
        TORCH_CHECK(
            !e.isTensor() || !e.toTensor().defined() || e.toTensor().is_cpu() || e.toTensor().device() == indexed,
            "indices should be either on cpu or on the same device as the indexed tensor (", indexed, ")");
      }
    } else if (v.isDevice()) {
      requested_device_ = v.toDevice();
      if (requested_device_->is_xla()) {
        requested_device_ = c10::Device(c10::DeviceType::XLA, device_index(requested_device_));
      }
    }
  }
  if (device < 0) {
    device = requested_device_ && requested_device_->is_xla() ? requested_device_->index() : current_device();
  }
  if (other_) {
    throw_other_device({c10::DeviceType::XLA, device}, *other_);
  }
}

at::Tensor Call::on_requested_device(at::Tensor result) const {
  const bool there =
      !requested_device_ || *requested_device_ == c10::Device(c10::DeviceType::XLA, device) || !result.defined();
  return there ? result : result.to(*requested_device_);
}

void Call::adopt_foreign() {
  for (size_t i = 0; i < info.kinds.size(); ++i) {
    auto& v = arguments[i];
    if (info.kinds[i] == ArgKind::Tensor || info.kinds[i] == ArgKind::TensorList) {
      v = with_tensors(v, [&](const at::Tensor& t) { return adopt(t, false); });
    }
  }
}

void Call::adopt_indices() {
  for (size_t i = 0; i < info.kinds.size(); ++i) {
    auto& v = arguments[i];
    if (info.kinds[i] != ArgKind::OptTensorList) {
      continue;
    }
    bool host = false;
    for_each_tensor(v, [&](const at::Tensor& t) { host = host || !is_xla(t); });
    if (host) {
      v = with_tensors(v, [&](const at::Tensor& t) { return adopt(t, true); });
    }
  }
}

void Call::collect() {
  args.clear();
  inputs.clear();
  settings = info.view ? CallSettings{0} : call_settings();
  attrs = begin_attrs(info, settings);
  key = info.hash;
  sequence = node_sequence();
  reads = {};
  first_storage_ = call_trace_of(device).first_storage();
  phase = current_phase();
  const auto& numbers_of = info.recorded();
  for (size_t i = 0; i < info.kinds.size(); ++i) {
    const auto& v = arguments[i];
    // The functional form of an out= call has no such argument, but shapes are checked against it.
    const bool drop = info.functional != nullptr && info.is_out[i];
    const size_t args_before = args.size();
    const size_t inputs_before = inputs.size();
    const Hash attrs_before = attrs;
    if (numbers_of.policy(i) == NumberPolicy::SpecializedTracked && is_numeric(v)) {
      add_adaptive(i, v);
    } else {
      add(i, v);
    }
    if (drop) {
      args.resize(args_before);
      inputs.resize(inputs_before);
      attrs = attrs_before;
    }
  }
  for (int i = 0; info.functional != nullptr && i < info.functional_extra; ++i) {
    push(attr({}));
  }
  key.mix(attrs);
}

uint64_t Call::signature(const MetaSet& metas) const {
  return info.hash.lo + attrs.lo * 0x9fb21c651e98df25ULL + metas.value.lo * 0xff51afd7ed558ccdULL;
}

void Call::note(const at::Tensor& t, bool aliased) {
  if (!t.defined()) {
    return;
  }
  if (!is_xla(t)) {
    if (t.is_meta() && t.key_set().has(c10::DispatchKey::XLA)) {
      fake_ = true;
      return;
    }
    foreign_ = foreign_ || !t.unsafeGetTensorImpl()->is_wrapped_number();
    // A number of the host's can be brought here to be read; what would be written then, or aliased, is its copy.
    if (aliased || t.dim() != 0 || !t.is_cpu()) {
      other_ = t.device();
    }
    if (other_ && device >= 0) {
      throw_other_device({c10::DeviceType::XLA, device}, *other_);
    }
    return;
  }
  if (device >= 0 && t.device().index() != device) {
    throw_other_device({c10::DeviceType::XLA, device}, t.device());
  }
  device = t.device().index();
  if (other_) {
    throw_other_device({c10::DeviceType::XLA, device}, *other_);
  }
}

at::Tensor Call::adopt(const at::Tensor& t, bool any_rank) const {
  if (!t.defined() || is_xla(t) || t.unsafeGetTensorImpl()->is_wrapped_number()) {
    return t;
  }
  if (!t.device().is_cpu() || (t.dim() != 0 && !any_rank)) {
    throw_other_device({c10::DeviceType::XLA, device}, t.device());
  }
  auto meta = contiguous_meta(t.sizes(), t.scalar_type());
  auto leaf = make_upload(meta, t, device);
  Alias alias;
  {
    const RecorderLock lock;
    alias = new_alias(std::move(leaf), meta, device);
  }
  return make_tensor(std::move(alias));
}

void Call::push(Arg arg) {
  hash_arg(attrs, arg);
  args.push_back(std::move(arg));
}

void Call::add_input(const at::Tensor& t) {
  auto& alias = impl_of(t)->alias;
  const auto& value = alias.current();
  if (const auto id = alias.storage->id; id < first_storage_) {
    reads.add(id);
  }
  history = history || torch::autograd::impl::grad_fn_unsafe(t) != nullptr;
  inputs.push_back(phase == Phase::Recomputation ? behind_barrier(value, device) : value);
  key.mix(alias.meta->layout);
  if (info.view || info.inplace_view) {
    key.mix(static_cast<uint64_t>(alias.meta->offset));
  }
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) {
    key.mix(static_cast<uint64_t>(1));
  }
}

void Call::add_number(const IValue& v, bool is_default) {
  auto kind = Arg::Kind::Attr;
  if (info.has_tensor && v.isInt()) {
    const bool special = is_special_number(v);
    kind = special && is_default ? Arg::Kind::Attr : Arg::Kind::Integer;
    if (special) {
      hash_attr(key, v);  // kernels refuse some of these, such as a norm of order 0
    }
  } else if (info.has_tensor && (v.isDouble() || v.isComplexDouble())) {
    kind = Arg::Kind::Number;
  }
  push({kind, 0, v});
}

void Call::add_adaptive(size_t i, const IValue& v) {
  const auto& self = arguments[0];
  push(adaptive_arg(info, i, self.isTensor() ? self.toTensor().dim() : 0, v));
  hash_attr(key, v);  // shapes and a view's offset depend on it
}

void Call::add_tensor(const at::Tensor& t) {
  if (!t.defined()) {
    push(attr({}));
  } else if (is_xla(t)) {
    push(input_arg());
    add_input(t);
  } else {
    key.mix(static_cast<uint64_t>(t.scalar_type()) + 100);
    add_number(number_of(t));
  }
}

void Call::add(size_t i, const IValue& v) {
  if (v.isNone()) {
    push(attr({}));
    return;
  }
  switch (info.kinds[i]) {
    case ArgKind::Tensor:
      add_tensor(v.toTensor());
      break;
    case ArgKind::TensorList: {
      const auto list = v.toTensorList();
      push({Arg::Kind::Inputs, static_cast<uint32_t>(list.size()), {}});
      for (const at::Tensor& t : list) {
        TORCH_CHECK(is_xla(t), "[record ", info.name,
                    "] got an undefined or host tensor in a list; move it with .to('xla')");
        add_input(t);
      }
      break;
    }
    case ArgKind::OptTensorList: {
      int64_t bits = 0;
      const auto list = v.toListRef();
      TORCH_CHECK(list.size() <= 62, "[record ", info.name, "] got ", list.size(), " indices, at most 62 are possible");
      for (size_t i = 0; i < list.size(); ++i) {
        if (list[i].isTensor() && list[i].toTensor().defined()) {
          bits |= int64_t{1} << i;
          add_input(list[i].toTensor());
        }
      }
      push({Arg::Kind::OptInputs, static_cast<uint32_t>(list.size()), bits});
      break;
    }
    case ArgKind::Number:
      add_number(v, v.isInt() && info.defaults[i] >= 0 && v.toInt() == info.defaults[i]);
      break;
    case ArgKind::NumberList: {
      // Kept constant: the few operators that take such lists write them into the program's structure.
      push({Arg::Kind::Attr, 0, v});
      break;
    }
    case ArgKind::Generator:
      generator = v.toGenerator();
      push(attr({}));
      break;
    case ArgKind::Attr:
      push({Arg::Kind::Attr, 0, v});
      break;
  }
}

}  // namespace torch_xla
