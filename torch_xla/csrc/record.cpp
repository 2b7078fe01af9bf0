#include "record.h"

#include <ATen/native/CPUFallback.h>
#include <torch/library.h>

#include <atomic>

#include "call.h"
#include "frame.h"
#include "op_info.h"
#include "python_hooks.h"
#include "random.h"
#include "recompute.h"
#include "refusals.h"
#include "shape_cache.h"
#include "tensor_impl.h"

namespace torch_xla {

namespace {

using c10::IValue;
using torch::jit::Stack;

std::atomic<uint64_t> recorded{0};

bool is_mask(const IValue& v) {
  return v.isTensor() && v.toTensor().defined() &&
         (v.toTensor().scalar_type() == at::kBool || v.toTensor().scalar_type() == at::kByte);
}

bool indexes_by_mask(const OpInfo& info, const Stack& stack, size_t base) {
  if (info.name != "aten.index.Tensor" && info.name != "aten._unsafe_index.Tensor" &&
      info.name != "aten.index.Tensor_out") {
    return false;
  }
  for (const auto& e : stack[base + 1].toListRef()) {
    if (is_mask(e)) {
      return true;
    }
  }
  return false;
}

bool is_alias_op(const OpInfo& info) { return info.name == "aten.alias.default" || info.name == "aten.detach.default"; }

void run_on_host(const c10::OperatorHandle& op, Stack* stack, const OpInfo& info, const char* reason) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "[record ", info.op.schema().name(), "] ", reason,
      ", and it has no CPU kernel that could run instead; register one, and a fake kernel, with torch.library");
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
  raise_if_kernel_refuses(call.info, c10::ArrayRef<IValue>(call.stack).slice(call.base));
  try {
    return infer_metas(call.info, c10::ArrayRef<IValue>(call.stack).slice(call.base), call.key);
  } catch (const c10::NotImplementedError&) {
    return {};
  } catch (...) {
    raise_as_cpu(call.info, c10::ArrayRef<IValue>(call.stack).slice(call.base));
    throw;
  }
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
  size_t number = 0;
  for (const auto which : call.info.return_writes) {
    if (which >= 0) {
      results.push_back(call.stack[call.base + call.info.written[which]]);
      continue;
    }
    const auto length = metas->returns[entry++];
    if (length == MetaSet::kNumber) {
      ++next;
      results.emplace_back(metas->numbers[number++]);
    } else if (length == MetaSet::kTensor) {
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
  TORCH_CHECK(info.functional != nullptr, "[record ", info.name,
              "] has no functional form; use the out-of-place operator");
  const at::Tensor self = (*stack)[call.base].toTensor();
  Stack view_stack(stack->begin() + static_cast<int64_t>(call.base), stack->end());
  record(info.functional->op, &view_stack);
  const at::Tensor view = view_stack.front().toTensor();
  Alias old;
  {
    const RecorderLock lock;
    old = impl_of(self)->rebind(impl_of(view)->alias);
  }
  torch::jit::drop(*stack, info.kinds.size());
  stack->push_back(self);
}

// What was replaced, to be destroyed after the recorder's lock is gone.
struct Replaced {
  std::vector<Value> values;
  std::vector<Alias> aliases;
};

void write_tensor(const at::Tensor& t, Value value, const MetaRef& meta, Replaced& replaced) {
  auto* const impl = impl_of(t);
  auto& storage = *impl->alias.storage;
  if (value.node->seeded && storage.origin && storage.value == storage.origin) {
    storage.origin = {};  // random numbers replace what the memory was made with: it is never needed
  }
  if (impl->sizes() != c10::IntArrayRef(meta->sizes)) {  // an out= tensor that was resized
    const auto resized = make_meta(meta->sizes, meta->strides, impl->storage_offset(), meta->dtype);
    if (extent(*resized) > storage.nbytes()) {
      storage.resize(extent(*resized), resized, replaced.values);
    }
    replaced.aliases.push_back(impl->rebind(impl->alias.as_strided(resized)));
  }
  impl->alias.write(std::move(value));
}

void record_call(Call& call, const MetaSetPtr& metas) {
  auto& info = call.info;
  auto& op = info.functional != nullptr ? *info.functional : info;
  std::vector<Alias> aliases;
  std::vector<at::Tensor> touched;
  Replaced replaced;
  {
    const RecorderLock lock;
    const bool seeded = info.seeded && (info.dropout < 0 || call.stack[call.base + info.dropout].toDouble() != 0);
    if (auto gradient = seeded ? awaited(call.device) : Value()) {
      call.inputs.push_back(std::move(gradient));
    }
    const auto node = make_node(op, std::move(call.args), std::move(call.inputs), metas, call.attrs);
    if (seeded) {
      node->seeded = true;
      next_seed(call.device, call.generator, node->seed);
    }
    note_recorded(node, call.device);
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
        write_tensor(v.toTensor(), {node, out}, {metas, out}, replaced);
        touched.push_back(v.toTensor());
        ++out;
      } else if (v.isTensorList()) {
        for (const at::Tensor& t : v.toTensorList()) {
          write_tensor(t, {node, out}, {metas, out}, replaced);
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

// `first` is the position of the sizes.
void check_as_strided(const Call& call, size_t first) {
  const auto self = call.stack[call.base].toTensor();
  const auto sizes = call.stack[call.base + first].toIntVector();
  const auto strides = call.stack[call.base + first + 1].toIntVector();
  const auto& offset_argument = call.stack[call.base + first + 2];
  const int64_t offset = offset_argument.isNone() ? self.storage_offset() : offset_argument.toInt();
  TORCH_CHECK(sizes.size() == strides.size(), "mismatch in length of strides and shape");
  int64_t last = offset;
  bool empty = false;
  for (size_t i = 0; i < sizes.size(); ++i) {
    TORCH_CHECK(strides[i] >= 0,
                "as_strided: Negative strides are not supported at the moment, got strides: ", strides);
    empty = empty || sizes[i] == 0;
    last += (sizes[i] - 1) * strides[i];
  }
  const auto bytes = static_cast<int64_t>(self.storage().nbytes());
  const auto item = static_cast<int64_t>(self.element_size());
  TORCH_CHECK(offset >= 0 && (empty || (last + 1) * item <= bytes), "setStorage: sizes ", c10::IntArrayRef(sizes),
              ", strides ", c10::IntArrayRef(strides), ", storage offset ", offset, ", and itemsize ", item,
              " requiring a storage size of ", (last + 1) * item, " are out of bounds for storage of size ", bytes);
}

}  // namespace

void record(const c10::OperatorHandle& op, Stack* stack) {
  recorded.fetch_add(1, std::memory_order_relaxed);
  auto& info = op_info(op);
  const FrameScope frame;
  Call call(info, *stack);
  if (!call.prepare()) {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), stack);
    return;
  }
  raise_if_refused(info, c10::ArrayRef<IValue>(*stack).slice(call.base));
  if (info.needs_host || indexes_by_mask(info, *stack, call.base)) {
    run_on_host(op, stack, info, "its result depends on the values");
    return;
  }
  if (info.has_indices) {
    call.adopt_indices();
  }
  if (info.inplace_view) {
    record_inplace_view(call, stack);
    return;
  }
  if (info.name == "aten.as_strided.default") {
    check_as_strided(call, 1);
    const auto self = (*stack)[call.base].toTensor();
    const auto& offset = (*stack)[call.base + 3];
    record_view(call, make_meta((*stack)[call.base + 1].toIntVector(), (*stack)[call.base + 2].toIntVector(),
                                offset.isNone() ? self.storage_offset() : offset.toInt(), self.scalar_type())
                          .set);
    return;
  }
  if (info.name == "aten.as_strided_scatter.default") {
    check_as_strided(call, 2);
  }
  const auto metas = metas_of(call);
  if (!metas.defined()) {
    run_on_host(op, stack, info, "PyTorch has no Meta kernel for it");
    return;
  }
  info.calls.fetch_add(1, std::memory_order_relaxed);
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
        op, c10::DispatchKey::XLA, c10::KernelFunction::makeFromBoxedFunction<&record>(), std::nullopt, nullptr,
        "torch_xla"));
  }
}

uint64_t recorded_ops() { return recorded.load(std::memory_order_relaxed); }

TORCH_LIBRARY_IMPL(_, XLA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&record>()); }

}  // namespace torch_xla
