#include "record/record.h"

#include <ATen/ATen.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <c10/core/AutogradState.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "base/python_hooks.h"
#include "base/tensors_of.h"
#include "base/user_line.h"
#include "device/random.h"
#include "ir/op_info.h"
#include "loops/call_trace.h"
#include "record/call.h"
#include "record/eager_checks.h"
#include "record/masked_selection.h"
#include "record/meta_cache.h"
#include "record/recompute.h"
#include "record/unboxed.h"
#include "tensor/tensor_impl.h"

namespace torch_xla {

namespace {

using c10::IValue;
using torch::jit::Stack;

bool is_mask(const IValue& v) {
  return v.isTensor() && v.toTensor().defined() &&
         (v.toTensor().scalar_type() == at::kBool || v.toTensor().scalar_type() == at::kByte);
}

bool indexes_by_mask(const IValue& indices) {
  const auto list = indices.toListRef();
  return std::any_of(list.begin(), list.end(), &is_mask);
}

void run_on_host(const OpInfo& info, Stack* stack, const char* reason) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      info.op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "[record ", info.op.schema().name(), "] ", reason,
      ", and it has no CPU kernel that could run instead; register one, and a fake kernel, with torch.library");
  TORCH_CHECK_NOT_IMPLEMENTED(!info.view, "[record ", info.op.schema().name(), "] is a view, and ", reason,
                              ", so that writes to it would be lost; register a Meta kernel with torch.library");
  note_host_op(info.op.schema().name(), reason);
  at::native::cpu_fallback(info.op, stack);
}

// The metas of a call of a known signature, with numbers that may be refused and were not seen before; null for others.
MetaSetPtr metas_with_new_numbers(const Call& call) {
  const auto find = [&] {
    const RecorderLock lock;
    const auto* const cached = find_metas(call.key);
    return cached == nullptr ? MetaSetPtr() : *cached;
  };
  auto metas = find();
  if (metas.defined()) {
    raise_if_refused(call.info, call.argument_list(), {});
    const RecorderLock lock;
    note_validated_numbers(call.info, call.argument_list(), call.key, metas->validated_magnitude);
  }
  return metas;
}

// The metas of a call that the cache does not know; null where PyTorch cannot tell without the data.
MetaSetPtr inferred_metas(const Call& call) {
  const auto arguments = call.argument_list();
  if (auto metas = metas_with_new_numbers(call); metas.defined()) {
    return metas;
  }
  if (call.info.form == Form::AsStrided) {  // a Meta kernel would not know how large the storage is
    const auto& self = arguments[0].toTensor();
    const auto offset = arguments[3].isNone() ? self.storage_offset() : arguments[3].toInt();
    return make_meta(arguments[1].toIntVector(), arguments[2].toIntVector(), offset, self.scalar_type()).set;
  }
  // Neither this device nor the host computes it. What is recorded by a kernel of its own is lowered: to ask would
  // import all rules, which a step that runs operator by operator has no other use for.
  if (call.info.name.rfind("aten.", 0) == 0 && !call.info.op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU) &&
      !call.info.op.hasKernelForDispatchKey(c10::DispatchKey::AutogradXLA) &&
      !is_lowered(call.info.functional != nullptr ? call.info.functional->name : call.info.name)) {
    return {};
  }
  try {
    return infer_metas(call.info, arguments, call.key);
  } catch (const c10::NotImplementedError&) {
    return {};
  } catch (std::exception& error) {
    if (!refuses_call(error)) {
      throw;
    }
    // Of others' operators a fake kernel may say that the shape depends on the values, and zeros would promise another.
    if (!call.info.view && call.info.op.schema().name().rfind("aten::", 0) != 0 &&
        call.info.op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) {
      return {};
    }
    raise_if_refused(call.info, arguments, {});  // before the CPU kernel gets what it does not bear
    if (auto metas = infer_metas_as_cpu(call.info, arguments, call.key); metas.defined()) {
      return metas;
    }
    throw;
  }
}

// What recording a call leaves, to be handed out or destroyed after the recorder's lock is gone.
struct Outcome {
  c10::SmallVector<Alias, 2> results;  // the fresh ones; without a storage where there is none
  c10::SmallVector<const at::Tensor*, 2> written;
  Vector<Value> old_values;
  std::vector<Alias> old_aliases;
};

// The chunks of `unbind` and `split` are recorded as `tensor[i]` or `tensor[i:j]`: a loop over them then has few
// graphs.
void emit_chunks(const Call& call, const MetaSetPtr& metas, Outcome& outcome) {
  static auto& unbind = op_info("aten::unbind", "int");
  static auto& select = op_info("aten::select", "int");
  static auto& slice = op_info("aten::slice", "Tensor");
  const auto& self = impl_of(call.arguments[0].toTensor())->alias;
  const auto rank = static_cast<int64_t>(self.meta->sizes.size());
  const bool rows = &call.info == &unbind;
  auto& op = rows ? select : slice;
  const auto& dim = call.args.at(rows ? 1 : 2);
  const auto d = c10::maybe_wrap_dim(dim.value.toInt(), rank);
  int64_t start = 0;
  for (uint32_t i = 0; i < metas->metas.size(); ++i) {
    const auto chunk = single({metas, i});
    Args args{input_arg(), dim, adaptive_arg(op, 2, rank, start)};
    start += rows ? 1 : chunk->metas[0].sizes[d];
    if (!rows) {
      args.push_back(adaptive_arg(op, 3, rank, start));
      args.push_back(attr(int64_t{1}));
    }
    const auto node = make_node(op, Args(args), Inputs(call.inputs), chunk);
    outcome.results.push_back(self.view(op, std::move(args), chunk, node));
  }
}

void emit_views(Call& call, const MetaSetPtr& metas, Outcome& outcome) {
  const auto& self = impl_of(call.arguments[0].toTensor())->alias;
  if (call.info.form == Form::Chunks) {
    emit_chunks(call, metas, outcome);
  } else if (call.info.form == Form::AsStrided || call.info.inverse == Inverse::Memory) {
    for (uint32_t i = 0; i < metas->metas.size(); ++i) {
      outcome.results.push_back(self.as_strided({metas, i}));
    }
  } else {
    const auto node = make_node(call.info, Args(call.args), std::move(call.inputs), metas, call.settings, call.attrs);
    outcome.results.push_back(self.view(call.info, call.args, metas, node));
  }
}

// `t_`, `squeeze_` and the like: the tensor becomes a view of itself.
void record_inplace_view(Call& call, Stack* stack) {
  auto& info = call.info;
  TORCH_CHECK(info.functional != nullptr, "[record ", info.name,
              "] has no functional form; use the out-of-place operator");
  const at::Tensor self = call.arguments[0].toTensor();
  Stack view_stack(call.argument_list().begin(), call.argument_list().end());
  record(info.functional->op, &view_stack);
  const at::Tensor view = view_stack.front().toTensor();
  Alias old;
  {
    const RecorderLock lock;
    old = rebind(self, impl_of(view)->alias);
  }
  torch::jit::drop(*stack, info.kinds.size());
  stack->push_back(self);
}

void write_tensor(const at::Tensor& t, Value value, const MetaRef& meta, Outcome& outcome) {
  auto& alias = impl_of(t)->alias;
  auto& storage = *alias.storage;
  if (value.node->seeded && storage.initial_fill && storage.value == storage.initial_fill) {
    storage.initial_fill = {};  // random numbers replace what the memory was made with: it is never needed
  }
  if (t.sizes() != c10::IntArrayRef(meta->sizes)) {  // an out= tensor that was resized
    const auto resized = make_meta(meta->sizes, meta->strides, t.storage_offset(), meta->dtype);
    if (extent(*resized) > storage.nbytes()) {
      storage.resize(extent(*resized), resized, outcome.old_values);
    }
    outcome.old_aliases.push_back(rebind(t, alias.as_strided(resized)));
  }
  alias.write(std::move(value));
  outcome.written.push_back(&t);
}

void emit_call(Call& call, const MetaSetPtr& metas, Outcome& outcome) {
  auto& info = call.info;
  auto& op = info.functional != nullptr ? *info.functional : info;
  const bool seeded = info.seeded && (info.dropout < 0 || call.arguments[info.dropout].toDouble() != 0);
  if (seeded && call.phase == Phase::Recomputation) {
    if (auto gradient = gradient_to_wait_for(call.device)) {
      call.inputs.push_back(std::move(gradient));
    }
  }
  const auto node = make_node(op, std::move(call.args), std::move(call.inputs), metas, call.settings, call.attrs);
  if (seeded) {
    node->seeded = true;
    next_seed(call.device, call.generator, node->seed);
  }
  if (call.phase == Phase::Backward) {
    note_backward(node, call.device);
  }
  uint32_t out = 0;
  size_t entry = 0;
  for (const auto which : info.return_writes) {
    if (which >= 0) {
      continue;
    }
    const auto length = metas->returns[entry++];
    for (int32_t i = 0; i < (length < 0 ? 1 : length); ++i, ++out) {
      outcome.results.push_back(metas->metas[out].defined() ? new_alias({node, out}, {metas, out}, call.device)
                                                            : Alias());
    }
  }
  for (const auto position : info.written) {
    for_each_tensor(call.arguments[position], [&](const at::Tensor& t) {
      write_tensor(t, {node, out}, {metas, out}, outcome);
      ++out;
    });
  }
}

// Wants the recorder's lock.
void emit(Call& call, const MetaSetPtr& metas, Outcome& outcome) {
  call.info.calls.fetch_add(1, std::memory_order_relaxed);
  note_call(call.device, {call.signature(*metas), call.kind(*metas), call.sequence, call.reads,
                          call.phase != Phase::Forward, call.history});
  if (call.info.view) {
    emit_views(call, metas, outcome);
  } else {
    emit_call(call, metas, outcome);
  }
}

// Most calls are like one before: they take the lock once. Null for any other.
MetaSetPtr emit_cached(Call& call, Outcome& outcome) {
  const RecorderLock lock;
  call.collect();
  const auto* const cached = find_metas(call.key);
  constexpr auto kNone = std::numeric_limits<double>::infinity();
  if (cached == nullptr ||
      ((*cached)->validated_magnitude < kNone &&
       !are_validated_numbers(call.info, call.argument_list(), call.key, (*cached)->validated_magnitude))) {
    return {};
  }
  emit(call, *cached, outcome);
  return *cached;
}

// The fresh tensors of a call, computed already in eager mode.
Tensors make_fresh(const Call& call, Outcome& outcome) {
  Tensors fresh;
  for (auto& alias : outcome.results) {
    if (!alias.storage.defined()) {
      fresh.emplace_back();
    } else if (call.info.view) {
      fresh.push_back(make_view(std::move(alias), call.arguments[0].toTensor()));
    } else {
      fresh.push_back(make_tensor(std::move(alias)));
    }
  }
  if (!call.info.view && eager()) {
    std::vector<at::Tensor> touched;
    for (const auto* t : outcome.written) {
      touched.push_back(*t);
    }
    std::copy_if(fresh.begin(), fresh.end(), std::back_inserter(touched), [](const auto& t) { return t.defined(); });
    evaluate(touched);
  }
  if (has_loop_work()) {
    run_loop_work();
  }
  return fresh;
}

// Puts the results on the stack in place of the arguments, as the schema returns them.
void return_results(const Call& call, const MetaSetPtr& metas, Tensors fresh, Stack& stack) {
  c10::SmallVector<IValue, 2> results;
  auto next = fresh.begin();
  auto length = metas->returns.begin();
  auto number = metas->numbers.begin();
  for (const auto which : call.info.return_writes) {
    if (which >= 0) {
      results.push_back(call.arguments[call.info.written[which]]);
    } else if (*length == MetaSet::kNumber) {
      ++next;
      results.emplace_back(*number++);
    } else if (*length == MetaSet::kTensor) {
      results.emplace_back(call.on_requested_device(std::move(*next++)));
    } else {
      c10::List<at::Tensor> list;
      for (int32_t i = 0; i < *length; ++i) {
        list.push_back(std::move(*next++));
      }
      results.emplace_back(std::move(list));
    }
    length += which < 0 ? 1 : 0;
  }
  torch::jit::drop(stack, call.info.kinds.size());
  for (auto& r : results) {
    stack.push_back(std::move(r));
  }
}

// `first` is the position of the sizes.
void check_as_strided(const Call& call, size_t first) {
  const auto self = call.arguments[0].toTensor();
  const auto sizes = call.arguments[first].toIntVector();
  const auto strides = call.arguments[first + 1].toIntVector();
  const auto& offset_argument = call.arguments[first + 2];
  const int64_t offset = offset_argument.isNone() ? self.storage_offset() : offset_argument.toInt();
  TORCH_CHECK(sizes.size() == strides.size(), "mismatch in length of strides and shape");
  for (const auto stride : strides) {
    TORCH_CHECK(stride >= 0, "as_strided: Negative strides are not supported at the moment, got strides: ", strides);
  }
  TORCH_CHECK(offset >= 0, "Tensor: invalid storage offset ", offset);
  at::native::checkInBoundsForStorage<int64_t>(sizes, strides, offset, self.dtype(), self.storage());
}

// A backward pass runs in the thread that asks for it, as it does on CPU. A thread for each device, as PyTorch has for
// GPUs, would have nothing to do at the same time, and no line of the user's. Who switches that on again is obeyed.
void keep_backward_in_this_thread() {
  thread_local bool done = false;
  if (!done && at::GradMode::is_enabled()) {
    done = true;
    c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  }
}

}  // namespace

void record(const c10::OperatorHandle& op, Stack* stack) {
  auto& info = op_info(op);
  const FrameScope frame;
  record_any(info, stack);
}

void record_any(OpInfo& info, Stack* stack) {
  keep_backward_in_this_thread();
  Call call(info, stack->data() + (stack->size() - info.kinds.size()));
  call.find_device();
  if (call.foreign()) {
    call.adopt_foreign();
  } else if (call.fake()) {
    info.op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), stack);
    return;
  }
  raise_if_overlapping(info, call.argument_list());
  const bool by_mask = info.form == Form::Index && indexes_by_mask(call.arguments[1]);
  if (info.needs_host != nullptr || by_mask) {
    if (!record_selected(info, *stack)) {
      run_on_host(info, stack, by_mask ? "its result depends on the values" : info.needs_host);
    }
    return;
  }
  if (info.has_indices) {
    call.adopt_indices();
  }
  if (info.inplace_view) {
    record_inplace_view(call, stack);
    return;
  }
  if (info.form == Form::AsStrided) {
    check_as_strided(call, 1);
  } else if (info.form == Form::AsStridedScatter) {
    check_as_strided(call, 2);
  }
  Outcome outcome;
  auto metas = emit_cached(call, outcome);
  if (!metas.defined()) {
    const bool has_own_kernel = info.view || info.op.hasKernelForDispatchKey(c10::DispatchKey::AutogradXLA);
    if (!has_own_kernel && needs_host(info.recorded().name)) {  // asked before its metas are remembered
      run_on_host(info, stack, "it has no lowering, and the device's programs cannot call the host");
      return;
    }
    metas = inferred_metas(call);
    if (!metas.defined()) {
      run_on_host(info, stack, "no Meta kernel tells what it returns");
      return;
    }
    const RecorderLock lock;
    emit(call, metas, outcome);
  }
  return_results(call, metas, make_fresh(call, outcome), *stack);
}

std::optional<Tensors> record_cached(OpInfo& info, IValue* arguments) {
  keep_backward_in_this_thread();
  Call call(info, arguments);
  call.find_device();
  if (call.foreign() || call.fake()) {
    return {};
  }
  raise_if_overlapping(info, call.argument_list());
  Outcome outcome;
  if (!emit_cached(call, outcome).defined()) {
    return {};
  }
  return make_fresh(call, outcome);
}

namespace {

void register_kernel(const std::string& name, c10::BoxedKernel kernel) {
  static auto* const registrations = new std::vector<c10::RegistrationHandleRAII>();
  const auto dot = name.find('.', name.find("::"));
  const c10::OperatorName op{name.substr(0, dot), dot == std::string::npos ? "" : name.substr(dot + 1)};
  registrations->push_back(c10::Dispatcher::singleton().registerImpl(
      op, c10::DispatchKey::XLA, c10::KernelFunction::makeFromBoxedKernel(std::move(kernel)), std::nullopt, nullptr,
      "torch_xla"));
}

void raise_for_packing(const c10::OperatorHandle& op, Stack* /*stack*/) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "[record ", op.schema().name(), "] got a tensor on device xla, expected one on ",
                              "the CPU, for whose kernels its result is packed; move it with .cpu()");
}

void compute_on_host(const c10::OperatorHandle& op, Stack* stack) {
  const FrameScope frame;
  run_on_host(op_info(op), stack, "its kernel reads memory itself");
}

// PyTorch says this in what it takes such an operator apart into; below autograd nothing is said.
void record_out(const c10::OperatorHandle& op, Stack* stack) {
  const bool differentiates =
      c10::GradMode::is_enabled() && !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradOther);
  for (const auto& v : torch::jit::last(*stack, op.schema().arguments().size())) {
    TORCH_CHECK(!differentiates || !v.isTensor() || !v.toTensor().requires_grad(), op.schema().name(),
                "(): functions with out=... arguments don't support automatic differentiation, but one of the ",
                "arguments requires grad.");
  }
  record(op, stack);
}

// Who asks for a check of the values at the call waits for it.
class RecordChecked final : public c10::OperatorKernel {
 public:
  explicit RecordChecked(std::string name) : name_(std::move(name)) {}
  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, Stack* stack) {
    const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
    const auto position = op.schema().argumentIndexWithName("check_errors");
    const bool checks = position && arguments[*position].toBool();
    const bool single = arguments[0].toTensor().dim() == 2;
    record(op, stack);
    if (checks) {
      at::_linalg_check_errors(stack->back().toTensor(), name_, single);
    }
  }

 private:
  const std::string name_;
};

}  // namespace

void record_undecomposed(const std::vector<std::string>& names) {
  for (const auto& name : names) {
    if (unboxed_kernels().count(name) == 0) {
      register_kernel(name, name.size() > 4 && name.compare(name.size() - 4, 4, ".out") == 0
                                ? c10::BoxedKernel::makeFromFunction<&record_out>()
                                : c10::BoxedKernel::makeFromFunction<&record>());
    }
  }
}

void check_errors(const std::unordered_map<std::string, std::string>& names) {
  for (const auto& [op, name] : names) {
    register_kernel(op, c10::BoxedKernel::makeFromFunctor(std::make_unique<RecordChecked>(name)));
  }
}

void refuse_packing(const std::vector<std::string>& names) {
  for (const auto& name : names) {
    register_kernel(name, c10::BoxedKernel::makeFromFunction<&raise_for_packing>());
  }
}

void keep_on_host(const std::vector<std::string>& names) {
  for (const auto& name : names) {
    register_kernel(name, c10::BoxedKernel::makeFromFunction<&compute_on_host>());
  }
}

TORCH_LIBRARY_IMPL(_, XLA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&record>()); }

}  // namespace torch_xla
