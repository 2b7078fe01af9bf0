// Recurrent layers (`lstm`, `gru`, `rnn_tanh`, `rnn_relu`) stay one operator each, with a backward and a second
// backward of their own. PyTorch would take them apart into some operators per time step.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/gru_native.h>
#include <ATen/ops/lstm_native.h>
#include <ATen/ops/rnn_relu_native.h>
#include <ATen/ops/rnn_tanh_native.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include "tensor/tensor_impl.h"

namespace torch_xla {

namespace {

using at::Tensor;
using at::TensorList;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// What an operator is beside its tensors; `mode` is "lstm", "gru", "tanh" or "relu".
struct Spec {
  std::string mode;
  bool biases = false;
  int64_t layers = 0;
  bool bidirectional = false;

  int64_t directions() const { return bidirectional ? 2 : 1; }
  int64_t gates() const { return mode == "lstm" ? 4 : mode == "gru" ? 3 : 1; }
  size_t states() const { return mode == "lstm" ? 2 : 1; }
};

// The tensors of one call. `input` is `[T, B, I]`, or `[N, I]` with `batch_sizes` where sequences are packed; `mask` is
// the dropout between layers.
struct Layer {
  Tensor input;
  variable_list state;
  variable_list weights;
  std::optional<Tensor> batch_sizes;
  std::optional<Tensor> mask;
};

// Calls an operator of these, which takes `first` and `last` before and after the tensors of the layer.
std::vector<Tensor> run(const char* name, const std::vector<TensorList>& first, const Layer& x,
                        const std::vector<TensorList>& last, const Spec& s) {
  torch::jit::Stack stack(first.begin(), first.end());
  torch::jit::push(stack, x.input, x.state, x.weights, x.batch_sizes, x.mask);
  stack.insert(stack.end(), last.begin(), last.end());
  torch::jit::push(stack, s.mode, s.biases, s.layers, s.bidirectional);
  const at::AutoDispatchBelowADInplaceOrView guard;
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(stack);
  return stack[0].toTensorVector();
}

// Autograd keeps flat lists of tensors and numbers.
void save(AutogradContext* ctx, variable_list first, const Layer& x, variable_list last, const Spec& s) {
  auto& data = ctx->saved_data;
  data["mode"] = s.mode;
  data["biases"] = s.biases;
  data["layers"] = s.layers;
  data["bidirectional"] = s.bidirectional;
  data["first"] = static_cast<int64_t>(first.size());
  data["weights"] = static_cast<int64_t>(x.weights.size());
  first.push_back(x.input);
  first.insert(first.end(), x.state.begin(), x.state.end());
  first.insert(first.end(), x.weights.begin(), x.weights.end());
  first.push_back(x.batch_sizes.value_or(Tensor()));
  first.push_back(x.mask.value_or(Tensor()));
  first.insert(first.end(), last.begin(), last.end());
  ctx->save_for_backward(std::move(first));
}

struct Saved {
  variable_list first;
  Layer layer;
  variable_list last;
  Spec spec;
};

Saved load(AutogradContext* ctx) {
  auto& data = ctx->saved_data;
  Saved out;
  out.spec = {data["mode"].toStringRef(), data["biases"].toBool(), data["layers"].toInt(),
              data["bidirectional"].toBool()};
  auto saved = ctx->get_saved_variables();
  auto next = saved.begin();
  const auto take = [&](size_t n) {
    variable_list list(next, next + static_cast<int64_t>(n));
    next += static_cast<int64_t>(n);
    return list;
  };
  const auto optional = [&] {
    Tensor t = *next++;
    return t.defined() ? std::optional<Tensor>(std::move(t)) : std::nullopt;
  };
  out.first = take(data["first"].toInt());
  out.layer.input = *next++;
  out.layer.state = take(out.spec.states());
  out.layer.weights = take(data["weights"].toInt());
  out.layer.batch_sizes = optional();
  out.layer.mask = optional();
  out.last.assign(next, saved.end());
  return out;
}

// Nothing flows back into `batch_sizes`, `mask` and the Spec.
void pad(variable_list& grads) { grads.resize(grads.size() + 3); }

struct RnnBackward : torch::autograd::Function<RnnBackward> {
  static variable_list forward(AutogradContext* ctx, TensorList grads, const Tensor& input, TensorList state,
                               TensorList weights, const std::optional<Tensor>& batch_sizes,
                               const std::optional<Tensor>& mask, const Spec& spec,
                               const std::shared_ptr<variable_list>& saved) {
    const Layer layer{input, state.vec(), weights.vec(), batch_sizes, mask};
    save(ctx, grads.vec(), layer, {}, spec);
    return run("torch_xla::rnn_backward", {grads}, layer, {*saved}, spec);
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& second) {
    const auto saved = load(ctx);
    TORCH_CHECK(!at::GradMode::is_enabled(), "[rnn] a third derivative of ", saved.spec.mode,
                " was asked for, and there are two; pass create_graph=False to the second torch.autograd.grad");
    auto grads = run("torch_xla::rnn_double_backward", {second, saved.first}, saved.layer, {}, saved.spec);
    pad(grads);
    grads.emplace_back();
    return grads;
  }
};

struct Rnn : torch::autograd::Function<Rnn> {
  static variable_list forward(AutogradContext* ctx, const Tensor& input, TensorList state, TensorList weights,
                               const std::optional<Tensor>& batch_sizes, const std::optional<Tensor>& mask,
                               const Spec& spec) {
    const Layer layer{input, state.vec(), weights.vec(), batch_sizes, mask};
    auto results = run("torch_xla::rnn", {}, layer, {}, spec);
    const auto outputs = results.begin() + 1 + static_cast<int64_t>(spec.states());
    save(ctx, {}, layer, {outputs, results.end()}, spec);
    results.erase(outputs, results.end());
    return results;
  }
  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = load(ctx);
    const auto& x = saved.layer;
    auto results =
        at::GradMode::is_enabled()
            ? RnnBackward::apply(TensorList(grads), x.input, TensorList(x.state), TensorList(x.weights), x.batch_sizes,
                                 x.mask, saved.spec, std::make_shared<variable_list>(saved.last))
            : run("torch_xla::rnn_backward", {grads}, x, {saved.last}, saved.spec);
    pad(results);
    return results;
  }
};

// C++ autograd functions know nothing of `torch.func`.
bool inside_functorch() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode) ||
         c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerBackMode);
}

// Whether a call is one that the operators above describe. What is not (a wrong shape, mixed types, a functorch
// transform, forward-mode gradients) is left to PyTorch's own kernel, which also words the errors.
bool is_supported(const Tensor& input, const std::optional<Tensor>& batch_sizes, TensorList state, TensorList weights,
                  const Spec& s) {
  const auto dtype = input.scalar_type();
  const auto plain = [&](const Tensor& t) {
    return t.defined() && t.key_set().has(c10::DispatchKey::XLA) && !t.key_set().has(c10::DispatchKey::Python) &&
           t.scalar_type() == dtype && !t._fw_grad(0).defined();
  };
  const auto shaped = [](const Tensor& t, c10::IntArrayRef sizes) { return t.sizes() == sizes; };
  if (inside_functorch() || !at::isFloatingType(dtype) || state.size() != s.states() || s.layers <= 0 ||
      !plain(input) || !std::all_of(state.begin(), state.end(), plain) ||
      !std::all_of(weights.begin(), weights.end(), plain) || !plain(state[0]) || state[0].dim() != 3) {
    return false;
  }
  const auto cells = s.layers * s.directions();
  const auto per_cell = static_cast<int64_t>(weights.size()) / cells;
  const bool projected = s.mode == "lstm" && per_cell == (s.biases ? 5 : 3);
  const auto batch = state[0].size(1);
  const auto out = state[0].size(2);
  const auto hidden = state.back().size(-1);
  if (static_cast<int64_t>(weights.size()) != cells * per_cell || per_cell != (s.biases ? 4 : 2) + projected ||
      (!projected && out != hidden) ||
      !std::all_of(state.begin(), state.end() - 1, [&](const Tensor& t) { return shaped(t, {cells, batch, out}); }) ||
      !shaped(state.back(), {cells, batch, hidden})) {
    return false;
  }
  if (batch_sizes) {
    if (input.dim() != 2 || batch_sizes->dim() != 1 || !batch_sizes->device().is_cpu() ||
        batch_sizes->scalar_type() != at::kLong || batch_sizes->size(0) == 0 || input.size(0) == 0 ||
        (*batch_sizes)[0].item<int64_t>() != batch || batch_sizes->sum().item<int64_t>() != input.size(0)) {
      return false;
    }
  } else if (input.dim() != 3 || input.size(0) == 0 || input.size(1) != batch) {
    return false;
  }
  for (int64_t i = 0; i < cells; ++i) {
    const auto w = weights.slice(i * per_cell, per_cell);
    const auto features = i < s.directions() ? input.size(-1) : out * s.directions();
    const auto rows = s.gates() * hidden;
    if (!shaped(w[0], {rows, features}) || !shaped(w[1], {rows, out}) ||
        (s.biases && (!shaped(w[2], {rows}) || !shaped(w[3], {rows}))) ||
        (projected && !shaped(w.back(), {out, hidden}))) {
      return false;
    }
  }
  return true;
}

// Runs time-major, or packed, input through the whole operator: output, then states.
variable_list apply(const Tensor& input, const std::optional<Tensor>& batch_sizes, TensorList state, TensorList weights,
                    double dropout, bool train, const Spec& spec) {
  Layer x{input, state.vec(), weights.vec(), {}, {}};
  if (batch_sizes) {
    x.batch_sizes = batch_sizes->to(input.device());
  }
  if (train && dropout > 0 && spec.layers > 1) {
    const auto width = state[0].size(2) * spec.directions();
    const auto steps = batch_sizes ? batch_sizes->size(0) : input.size(0);
    x.mask = input.new_empty({spec.layers - 1, steps, state[0].size(1), width})
                 .bernoulli_(1 - dropout)
                 .mul_(dropout < 1 ? 1 / (1 - dropout) : 0);
  }
  auto results = Rnn::apply(x.input, TensorList(x.state), TensorList(x.weights), x.batch_sizes, x.mask, spec);
  results.resize(1 + spec.states());
  return results;
}

using One = std::tuple<Tensor, Tensor>;
using Two = std::tuple<Tensor, Tensor, Tensor>;

template <class Result>
Result as(const variable_list& r) {
  if constexpr (std::is_same_v<Result, Two>) {
    return {r[0], r[1], r[2]};
  } else {
    return {r[0], r[1]};
  }
}

template <class Result, class State, auto Native>
Result padded(const char* mode, const Tensor& input, const State& hx, TensorList params, bool has_biases,
              int64_t num_layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  const Spec spec{mode, has_biases, num_layers, bidirectional};
  const Tensor x = batch_first && input.dim() == 3 ? input.transpose(0, 1) : input;
  if (!is_supported(x, std::nullopt, hx, params, spec)) {
    return Native(input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first);
  }
  auto r = apply(x, std::nullopt, hx, params, dropout, train, spec);
  r[0] = batch_first ? r[0].transpose(0, 1) : r[0];
  return as<Result>(r);
}

template <class Result, class State, auto Native>
Result packed(const char* mode, const Tensor& data, const Tensor& batch_sizes, const State& hx, TensorList params,
              bool has_biases, int64_t num_layers, double dropout, bool train, bool bidirectional) {
  const Spec spec{mode, has_biases, num_layers, bidirectional};
  if (!is_supported(data, batch_sizes, hx, params, spec)) {
    return Native(data, batch_sizes, hx, params, has_biases, num_layers, dropout, train, bidirectional);
  }
  return as<Result>(apply(data, batch_sizes, hx, params, dropout, train, spec));
}

template <class Result, class State>
using NativeInput = Result (*)(const Tensor&, State, TensorList, bool, int64_t, double, bool, bool, bool);
template <class Result, class State>
using NativeData = Result (*)(const Tensor&, const Tensor&, State, TensorList, bool, int64_t, double, bool, bool);

#define TORCH_XLA_RNN(name, mode, Result, State)                                                                     \
  Result name(const Tensor& input, State hx, TensorList params, bool has_biases, int64_t num_layers, double dropout, \
              bool train, bool bidirectional, bool batch_first) {                                                    \
    constexpr NativeInput<Result, State> native = &at::native::name;                                                 \
    return padded<Result, std::decay_t<State>, native>(mode, input, hx, params, has_biases, num_layers, dropout,     \
                                                       train, bidirectional, batch_first);                           \
  }                                                                                                                  \
  Result name##_packed(const Tensor& data, const Tensor& batch_sizes, State hx, TensorList params, bool has_biases,  \
                       int64_t num_layers, double dropout, bool train, bool bidirectional) {                         \
    constexpr NativeData<Result, State> native = &at::native::name;                                                  \
    return packed<Result, std::decay_t<State>, native>(mode, data, batch_sizes, hx, params, has_biases, num_layers,  \
                                                       dropout, train, bidirectional);                               \
  }
TORCH_XLA_RNN(lstm, "lstm", Two, TensorList)
TORCH_XLA_RNN(gru, "gru", One, const Tensor&)
TORCH_XLA_RNN(rnn_tanh, "tanh", One, const Tensor&)
TORCH_XLA_RNN(rnn_relu, "relu", One, const Tensor&)
#undef TORCH_XLA_RNN

void register_layers(torch::Library& m) {
  m.impl("lstm.input", TORCH_FN(lstm));
  m.impl("lstm.data", TORCH_FN(lstm_packed));
  m.impl("gru.input", TORCH_FN(gru));
  m.impl("gru.data", TORCH_FN(gru_packed));
  m.impl("rnn_tanh.input", TORCH_FN(rnn_tanh));
  m.impl("rnn_tanh.data", TORCH_FN(rnn_tanh_packed));
  m.impl("rnn_relu.input", TORCH_FN(rnn_relu));
  m.impl("rnn_relu.data", TORCH_FN(rnn_relu_packed));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(torch_xla, m) {
  m.def(
      "rnn(Tensor input, Tensor[] state, Tensor[] weights, Tensor? batch_sizes, Tensor? mask, str mode, bool biases, "
      "int layers, bool bidirectional) -> Tensor[]");
  m.def(
      "rnn_backward(Tensor[] grads, Tensor input, Tensor[] state, Tensor[] weights, Tensor? batch_sizes, Tensor? mask, "
      "Tensor[] saved, str mode, bool biases, int layers, bool bidirectional) -> Tensor[]");
  m.def(
      "rnn_double_backward(Tensor[] second, Tensor[] grads, Tensor input, Tensor[] state, Tensor[] weights, "
      "Tensor? batch_sizes, Tensor? mask, str mode, bool biases, int layers, bool bidirectional) -> Tensor[]");
}

TORCH_LIBRARY_IMPL(aten, AutogradXLA, m) { register_layers(m); }
TORCH_LIBRARY_IMPL(aten, XLA, m) { register_layers(m); }

// Under autocast all tensors of a layer take the lower precision, as for the fused kernels of other devices.
TORCH_LIBRARY_IMPL(aten, AutocastXLA, m) {
#define LOWER_PRECISION(op)                                   \
  KERNEL(c10::DeviceType::XLA, op, input, lower_precision_fp) \
  KERNEL(c10::DeviceType::XLA, op, data, lower_precision_fp)
  LOWER_PRECISION(lstm)
  LOWER_PRECISION(gru)
  LOWER_PRECISION(rnn_tanh)
  LOWER_PRECISION(rnn_relu)
#undef LOWER_PRECISION
}

}  // namespace torch_xla
