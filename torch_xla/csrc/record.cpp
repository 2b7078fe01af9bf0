#include "record.h"

#include <ATen/ATen.h>
#include <ATen/native/CPUFallback.h>
#include <torch/library.h>

#include <atomic>

#include "frame.h"
#include "op_info.h"
#include "python_hooks.h"
#include "random.h"
#include "shape_cache.h"
#include "tensor_impl.h"

namespace torch_xla {

namespace {

using c10::IValue;
using torch::jit::Stack;

std::atomic<uint64_t> recorded{0};

[[noreturn]] void throw_other_device(c10::Device one, c10::Device other) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", one, " and ", other, "!");
}

bool is_mask(const IValue& v) {
  return v.isTensor() && v.toTensor().defined() &&
         (v.toTensor().scalar_type() == at::kBool || v.toTensor().scalar_type() == at::kByte);
}

bool indexes_by_mask(const OpInfo& info, const Stack& stack, size_t base) {
  if (info.name != "aten.index.Tensor" && info.name != "aten._unsafe_index.Tensor" && info.name != "aten.index.Tensor_out") {
    return false;
  }
  for (const auto& e : stack[base + 1].toListRef()) {
    if (is_mask(e)) {
      return true;
    }
  }
  return false;
}

// Collects one call: which device it is on, and its arguments as the node will hold them.
class Call {
 public:
  Call(OpInfo& op, Stack& s) : info(op), stack(s), base(s.size() - op.kinds.size()) {}

  // Finds the device and brings stray host values to it. Runs without the lock: it may copy.
  void prepare() {
    for (size_t i = 0; i < info.kinds.size(); ++i) {
      auto& v = stack[base + i];
      if (info.kinds[i] == ArgKind::Tensor) {
        if (v.isTensor()) {
          note(v.toTensor());
        }
      } else if (info.kinds[i] == ArgKind::TensorList && v.isTensorList()) {
        for (const at::Tensor& t : v.toTensorList()) {
          note(t);
        }
      } else if (v.isDevice()) {
        device_argument = v.toDevice().index();
      }
    }
    if (device < 0) {
      device = std::max<c10::DeviceIndex>(device_argument, 0);
    }
    if (!foreign) {
      return;
    }
    for (size_t i = 0; i < info.kinds.size(); ++i) {
      auto& v = stack[base + i];
      if (info.kinds[i] == ArgKind::Tensor && v.isTensor()) {
        v = IValue(adopt(v.toTensor(), false));
      } else if (info.kinds[i] == ArgKind::TensorList && v.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& t : v.toTensorList()) {
          list.push_back(adopt(t, false));
        }
        v = list;
      }
    }
  }

  // Index lists may hold host tensors, as on every device.
  void adopt_indices() {
    for (size_t i = 0; i < info.kinds.size(); ++i) {
      auto& v = stack[base + i];
      if (info.kinds[i] != ArgKind::OptTensorList || !v.isList()) {
        continue;
      }
      bool host = false;
      for (const auto& e : v.toListRef()) {
        host = host || (e.isTensor() && e.toTensor().defined() && !is_xla(e.toTensor()));
      }
      if (!host) {
        continue;
      }
      c10::List<std::optional<at::Tensor>> list;
      for (const auto& e : v.toListRef()) {
        list.push_back(e.isTensor() && e.toTensor().defined() ? std::optional<at::Tensor>(adopt(e.toTensor(), true)) : std::nullopt);
      }
      v = list;
    }
  }

  // Fills `args`, `inputs`, `attrs` and `key`. Wants the lock.
  void collect() {
    args.clear();
    inputs.clear();
    attrs = Hash();
    key = info.hash;
    for (size_t i = 0; i < info.kinds.size(); ++i) {
      const auto& v = stack[base + i];
      // The functional form of an out= call has no such argument, but shapes are checked against it.
      const bool drop = info.functional != nullptr && info.is_out[i];
      const size_t kept_args = args.size();
      const size_t kept_inputs = inputs.size();
      const Hash kept_attrs = attrs;
      add(info.kinds[i], v);
      if (drop) {
        args.resize(kept_args);
        inputs.resize(kept_inputs);
        attrs = kept_attrs;
      }
    }
    for (int i = 0; info.functional != nullptr && i < info.functional_extra; ++i) {
      push({Arg::Kind::Attr, 0, {}});
    }
    key.mix(attrs);
  }

  OpInfo& info;
  Stack& stack;
  const size_t base;
  c10::DeviceIndex device = -1;
  Args args;
  Inputs inputs;
  Hash attrs;
  Hash key;
  c10::optional<at::Generator> generator;

 private:
  void note(const at::Tensor& t) {
    if (!t.defined()) {
      return;
    }
    if (!is_xla(t)) {
      foreign = foreign || !t.unsafeGetTensorImpl()->is_wrapped_number();
      if (t.dim() != 0) {
        other = t.device();
      }
      if (other && device >= 0) {
        throw_other_device({c10::DeviceType::XLA, device}, *other);
      }
      return;
    }
    if (device >= 0 && t.device().index() != device) {
      throw_other_device({c10::DeviceType::XLA, device}, t.device());
    }
    device = t.device().index();
    if (other) {
      throw_other_device({c10::DeviceType::XLA, device}, *other);
    }
  }

  at::Tensor adopt(const at::Tensor& t, bool any_rank) const {
    if (!t.defined() || is_xla(t) || t.unsafeGetTensorImpl()->is_wrapped_number()) {
      return t;
    }
    if (!t.device().is_cpu() || (t.dim() != 0 && !any_rank)) {
      throw_other_device({c10::DeviceType::XLA, device}, t.device());
    }
    auto meta = contiguous_meta(t.sizes(), t.scalar_type());
    return make_tensor(new_alias(make_leaf(meta, upload(t, device)), meta, device));
  }

  void push(Arg arg) {
    hash_arg(attrs, arg);
    args.push_back(std::move(arg));
  }

  void add_input(const at::Tensor& t) {
    auto* const impl = impl_of(t);
    inputs.push_back(impl->alias.current());
    key.mix(impl->alias.meta->layout);
    if (info.view || info.inplace_view) {
      key.mix(static_cast<uint64_t>(impl->alias.meta->offset));
    }
    if (impl->is_wrapped_number()) {
      key.mix(static_cast<uint64_t>(1));
    }
  }

  void add_number(const IValue& v) {
    const bool lift = info.has_tensor && (v.isDouble() || v.isInt() || v.isComplexDouble()) && !is_special_number(v);
    push({lift ? Arg::Kind::Number : Arg::Kind::Attr, 0, v});
  }

  void add_tensor(const at::Tensor& t) {
    if (!t.defined()) {
      push({Arg::Kind::Attr, 0, {}});
    } else if (is_xla(t)) {
      push({Arg::Kind::Input, 0, {}});
      add_input(t);
    } else {
      const auto number = t.item();
      key.mix(static_cast<uint64_t>(t.scalar_type()) + 100);
      add_number(number.isBoolean()         ? IValue(number.toBool())
                 : number.isIntegral(false) ? IValue(number.toLong())
                 : number.isComplex()       ? IValue(number.toComplexDouble())
                                            : IValue(number.toDouble()));
    }
  }

  void add(ArgKind kind, const IValue& v) {
    if (v.isNone()) {
      push({Arg::Kind::Attr, 0, {}});
      return;
    }
    switch (kind) {
      case ArgKind::Tensor:
        add_tensor(v.toTensor());
        break;
      case ArgKind::TensorList: {
        const auto list = v.toTensorList();
        push({Arg::Kind::Inputs, static_cast<uint32_t>(list.size()), {}});
        for (const at::Tensor& t : list) {
          TORCH_CHECK(is_xla(t), "[record ", info.name, "] got an undefined or host tensor in a list; move it with .to('xla')");
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
        add_number(v);
        break;
      case ArgKind::NumberList: {
        // Kept constant: the few operators that take such lists write them into the program's structure.
        push({Arg::Kind::Attr, 0, v});
        break;
      }
      case ArgKind::Generator:
        generator = v.toGenerator();
        push({Arg::Kind::Attr, 0, {}});
        break;
      case ArgKind::Attr:
        push({Arg::Kind::Attr, 0, v});
        break;
    }
  }

  bool foreign = false;
  std::optional<c10::Device> other;
  c10::DeviceIndex device_argument = -1;
};

bool is_alias_op(const OpInfo& info) {
  return info.name == "aten.alias.default" || info.name == "aten.detach.default" || info.name == "aten.lift_fresh.default";
}

void run_on_host(const c10::OperatorHandle& op, Stack* stack, const OpInfo& info, const char* reason) {
  note_host_op(info.op.schema().name(), reason);
  at::native::cpu_fallback(op, stack);
}

// The metas of the call, from the cache or from PyTorch; null where PyTorch cannot tell without the data.
MetaSetPtr metas_of(Call& call) {
  {
    const RecorderLock lock;
    call.collect();
    if (const auto* found = find_metas(call.key)) {
      return *found;
    }
  }
  MetaSetPtr metas;
  try {
    metas = infer_metas(call.info, c10::ArrayRef<IValue>(call.stack).slice(call.base));
  } catch (const c10::NotImplementedError&) {
    return {};
  }
  const RecorderLock lock;
  remember_metas(call.key, metas);
  return metas;
}

std::vector<Alias> view_results(Call& call, const MetaSetPtr& metas) {
  auto& self = impl_of(call.stack[call.base].toTensor())->alias;
  std::vector<Alias> results;
  if (is_alias_op(call.info)) {
    self.current();
    results.push_back(self);
  } else if (call.info.name == "aten.as_strided.default") {
    results.push_back(self.as_strided({metas, 0}));
  } else {
    const auto node = make_node(call.info, call.args, std::move(call.inputs), metas, call.attrs);
    for (uint32_t i = 0; i < metas->metas.size(); ++i) {
      results.push_back(self.view(call.info, call.args, metas, i, node));
    }
  }
  return results;
}

// Puts the results on the stack in place of the arguments, as the schema returns them.
void finish(Call& call, const MetaSetPtr& metas, std::vector<at::Tensor>& fresh) {
  std::vector<IValue> results;
  size_t next = 0;
  size_t entry = 0;
  for (const auto which : call.info.return_writes) {
    if (which >= 0) {
      results.push_back(call.stack[call.base + call.info.written[which]]);
      continue;
    }
    const auto length = metas->returns[entry++];
    if (length < 0) {
      results.emplace_back(std::move(fresh[next++]));
    } else {
      c10::List<at::Tensor> list;
      for (int32_t i = 0; i < length; ++i) {
        list.push_back(std::move(fresh[next++]));
      }
      results.emplace_back(std::move(list));
    }
  }
  torch::jit::drop(call.stack, call.info.kinds.size());
  for (auto& r : results) {
    call.stack.push_back(std::move(r));
  }
}

void record_view(Call& call, const MetaSetPtr& metas) {
  std::vector<Alias> aliases;
  {
    const RecorderLock lock;
    aliases = view_results(call, metas);
  }
  std::vector<at::Tensor> fresh;
  fresh.reserve(aliases.size());
  for (auto& a : aliases) {
    fresh.push_back(make_tensor(std::move(a)));
  }
  finish(call, metas, fresh);
}

// `t_`, `squeeze_` and the like: the tensor becomes a view of itself.
void record_inplace_view(Call& call, Stack* stack) {
  auto& info = call.info;
  TORCH_CHECK(info.functional != nullptr, "[record ", info.name, "] has no functional form; use the out-of-place operator");
  const at::Tensor self = (*stack)[call.base].toTensor();
  Stack view_stack(stack->begin() + static_cast<int64_t>(call.base), stack->end());
  record(info.functional->op, &view_stack);
  const at::Tensor view = view_stack.front().toTensor();
  Alias old;
  {
    const RecorderLock lock;
    old = impl_of(self)->alias;
    impl_of(self)->rebind(impl_of(view)->alias);
  }
  torch::jit::drop(*stack, info.kinds.size());
  stack->push_back(self);
}

void write_tensor(const at::Tensor& t, Value value, const MetaRef& meta, c10::DeviceIndex device) {
  auto* const impl = impl_of(t);
  if (impl->sizes() == c10::IntArrayRef(meta->sizes)) {
    impl->alias.write(std::move(value));
  } else {
    impl->rebind(new_alias(std::move(value), meta, device));  // an out= tensor that was resized
  }
}

void record_call(Call& call, const MetaSetPtr& metas) {
  auto& info = call.info;
  auto& op = info.functional != nullptr ? *info.functional : info;
  std::vector<Alias> aliases;
  std::vector<at::Tensor> touched;
  {
    const RecorderLock lock;
    const auto node = make_node(op, std::move(call.args), std::move(call.inputs), metas, call.attrs);
    if (info.seeded) {
      next_seed(call.device, call.generator, node->seed);
    }
    uint32_t out = 0;
    size_t entry = 0;
    for (const auto which : info.return_writes) {
      if (which >= 0) {
        continue;
      }
      const auto length = metas->returns[entry++];
      for (int32_t i = 0; i < (length < 0 ? 1 : length); ++i, ++out) {
        aliases.push_back(metas->metas[out].defined() ? new_alias({node, out}, {metas, out}, call.device) : Alias());
      }
    }
    for (const auto position : info.written) {
      const auto& v = call.stack[call.base + position];
      if (v.isTensor()) {
        write_tensor(v.toTensor(), {node, out}, {metas, out}, call.device);
        touched.push_back(v.toTensor());
        ++out;
      } else if (v.isTensorList()) {
        for (const at::Tensor& t : v.toTensorList()) {
          write_tensor(t, {node, out}, {metas, out}, call.device);
          touched.push_back(t);
          ++out;
        }
      }
    }
  }
  std::vector<at::Tensor> fresh;
  fresh.reserve(aliases.size());
  for (auto& a : aliases) {
    fresh.push_back(a.storage.defined() ? make_tensor(std::move(a)) : at::Tensor());
  }
  if (eager()) {
    for (const auto& t : fresh) {
      if (t.defined()) {
        touched.push_back(t);
      }
    }
    evaluate(touched);
  }
  finish(call, metas, fresh);
}

void check_as_strided(const Call& call) {
  const auto self = call.stack[call.base].toTensor();
  const auto sizes = call.stack[call.base + 1].toIntVector();
  const auto strides = call.stack[call.base + 2].toIntVector();
  const auto& offset_argument = call.stack[call.base + 3];
  const int64_t offset = offset_argument.isNone() ? self.storage_offset() : offset_argument.toInt();
  TORCH_CHECK(sizes.size() == strides.size(), "mismatch in length of strides and shape");
  int64_t last = offset;
  bool empty = false;
  for (size_t i = 0; i < sizes.size(); ++i) {
    TORCH_CHECK(strides[i] >= 0, "as_strided: Negative strides are not supported at the moment, got strides: ", strides);
    empty = empty || sizes[i] == 0;
    last += (sizes[i] - 1) * strides[i];
  }
  const auto& base_meta = impl_of(self)->alias.storage->meta;
  const int64_t bytes = base_meta->numel() * static_cast<int64_t>(c10::elementSize(base_meta->dtype));
  const auto item = static_cast<int64_t>(self.element_size());
  TORCH_CHECK(offset >= 0 && (empty || (last + 1) * item <= bytes), "setStorage: sizes ", sizes, ", strides ", strides,
              ", storage offset ", offset, ", and itemsize ", item, " requiring a storage size of ", (last + 1) * item,
              " are out of bounds for storage of size ", bytes);
}

}  // namespace

void record(const c10::OperatorHandle& op, Stack* stack) {
  recorded.fetch_add(1, std::memory_order_relaxed);
  auto& info = op_info(op);
  const FrameScope frame;
  Call call(info, *stack);
  if (info.needs_host || indexes_by_mask(info, *stack, call.base)) {
    run_on_host(op, stack, info, "its result depends on the values");
    return;
  }
  call.prepare();
  if (info.name.size() >= 10 && info.name.compare(0, 10, "aten.index") == 0) {
    call.adopt_indices();
  }
  if (info.inplace_view) {
    record_inplace_view(call, stack);
    return;
  }
  if (info.name == "aten.as_strided.default") {
    check_as_strided(call);
    const auto self = (*stack)[call.base].toTensor();
    const auto& offset = (*stack)[call.base + 3];
    record_view(call, make_meta((*stack)[call.base + 1].toIntVector(), (*stack)[call.base + 2].toIntVector(),
                                offset.isNone() ? self.storage_offset() : offset.toInt(), self.scalar_type()).set);
    return;
  }
  const auto metas = metas_of(call);
  if (!metas.defined()) {
    run_on_host(op, stack, info, "PyTorch has no Meta kernel for it");
    return;
  }
  if (info.view) {
    record_view(call, metas);
  } else {
    record_call(call, metas);
  }
}

void record_whole(const std::vector<std::string>& names) {
  static auto* const registrations = new std::vector<c10::RegistrationHandleRAII>();
  for (const auto& name : names) {
    const auto dot = name.find('.', name.find("::"));
    const c10::OperatorName op{name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)};
    registrations->push_back(c10::Dispatcher::singleton().registerImpl(
        op, c10::DispatchKey::XLA, c10::KernelFunction::makeFromBoxedFunction<&record>(), std::nullopt, nullptr, "torch_xla"));
  }
}

uint64_t recorded_ops() { return recorded.load(std::memory_order_relaxed); }

TORCH_LIBRARY_IMPL(_, XLA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&record>()); }

}  // namespace torch_xla
