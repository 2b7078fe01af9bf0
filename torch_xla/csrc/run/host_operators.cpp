#include "run/host_operators.h"

#include <ATen/Parallel.h>

#include <bit>
#include <limits>
#include <string>
#include <unordered_map>

#include "base/kernel_settings.h"
#include "base/tensors_of.h"
#include "device/random.h"
#include "ir/op_info.h"

namespace torch_xla {

namespace {

using at::Tensor;

// The kernel takes no float16.
Tensor not_half(const c10::IValue& v) {
  const auto& t = v.toTensor();
  return t.scalar_type() == at::kHalf ? t.to(at::kFloat) : t;
}

std::optional<Tensor> optional_tensor(const c10::IValue& v) {
  return v.isTensor() && v.toTensor().defined() ? std::optional<Tensor>(not_half(v)) : std::nullopt;
}

std::optional<double> optional_number(const c10::IValue& v) {
  return v.isNone() ? std::nullopt : std::optional<double>(v.toDouble());
}

Tensor heads(const Tensor& t, int64_t count) {
  return t.size(1) == count ? t : t.repeat_interleave(count / t.size(1), 1);
}

Tensor ungrouped(const Tensor& grad, int64_t count) {
  return grad.size(1) == count ? grad : grad.unflatten(1, {count, -1}).sum(2);
}

// What the CPU's fused kernel takes.
bool fits_flash(const Tensor& q, const Tensor& k, const Tensor& v, const std::optional<Tensor>& bias) {
  const auto dtype = q.scalar_type();
  return q.dim() == 4 && q.size(0) == k.size(0) && q.size(3) == v.size(3) && q.numel() > 0 && k.numel() > 0 &&
         (dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16) &&
         (!bias || ((bias->dim() == 2 || bias->dim() == 4) &&
                    (bias->scalar_type() == at::kBool || bias->scalar_type() == dtype)));
}

std::optional<Tensor> additive(const std::optional<Tensor>& bias, at::ScalarType dtype) {
  if (!bias || bias->scalar_type() != at::kBool) {
    return bias;
  }
  return at::zeros(bias->sizes(), bias->options().dtype(dtype))
      .masked_fill_(bias->logical_not(), -std::numeric_limits<double>::infinity());
}

std::optional<HostResults> attention(const Node& node, const HostStack& a) {
  const auto q = not_half(a[0]), k = not_half(a[1]), v = not_half(a[2]);
  const auto bias = optional_tensor(a[3]);
  if (node.seeded || !fits_flash(q, k, v, bias)) {
    return {};
  }
  const auto zero = at::zeros({}, at::kLong);
  auto [out, logsumexp] =
      at::_scaled_dot_product_flash_attention_for_cpu(q, heads(k, q.size(1)), heads(v, q.size(1)), 0.0, a[5].toBool(),
                                                      additive(bias, q.scalar_type()), optional_number(a[7]));
  return HostResults{out, logsumexp, Tensor(), Tensor(), Tensor(), Tensor(), zero, zero, Tensor()};
}

std::optional<HostResults> attention_backward(const Node& /*node*/, const HostStack& a) {
  const auto grad = not_half(a[0]), q = not_half(a[1]), k = not_half(a[2]), v = not_half(a[3]);
  const auto bias = optional_tensor(a[4]);
  const auto output_mask = a[5].toBoolList();
  if (a[12].toDouble() != 0 || (bias && output_mask[3]) || !fits_flash(q, k, v, bias)) {
    return {};
  }
  auto [grad_q, grad_k, grad_v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      grad, q, heads(k, q.size(1)), heads(v, q.size(1)), not_half(a[6]), a[7].toTensor(), 0.0, a[13].toBool(),
      additive(bias, q.scalar_type()), optional_number(a[16]));
  return HostResults{grad_q, ungrouped(grad_k, k.size(1)), ungrouped(grad_v, v.size(1)), Tensor()};
}

std::optional<HostResults> linear_backward(const Node& /*node*/, const HostStack& a) {
  const auto &x = a[0].toTensor(), &grad = a[1].toTensor(), &weight = a[2].toTensor();
  const auto output_mask = a[3].toBoolList();
  const auto rows = grad.reshape({-1, weight.size(0)});
  return HostResults{output_mask[0] ? rows.mm(weight).view(x.sizes()) : Tensor(),
                     output_mask[1] ? rows.t().mm(x.reshape({-1, weight.size(1)})) : Tensor(),
                     output_mask[2] ? rows.sum(0) : Tensor()};
}

// The type that a rule draws in.
bool draws_float32(const Node& node) {
  const auto dtype = node.meta(0).dtype;
  return dtype != at::kDouble && !at::isComplexType(dtype);
}

std::optional<HostResults> bernoulli(const Node& node, const HostStack& a) {
  if (!draws_float32(node)) {
    return {};
  }
  return HostResults{draw_unit(node.seed, node.meta(0).sizes).lt(static_cast<float>(a[1].toDouble()))};
}

std::optional<HostResults> dropout(const Node& node, const HostStack& a) {
  const auto& x = a[0].toTensor();
  const double p = a[1].toDouble();
  if (!draws_float32(node) || (a[2].isBool() && !a[2].toBool()) || p == 0 || p == 1) {
    return {};
  }
  auto keep = draw_unit(node.seed, x.sizes()).lt(static_cast<float>(1.0 - p));
  auto out = at::where(keep, x.to(at::kFloat) * static_cast<float>(1.0 / (1.0 - p)), at::zeros({}, at::kFloat));
  return HostResults{std::move(out), std::move(keep)};
}

std::optional<HostResults> uniform(const Node& node, const HostStack& /*arguments*/) {
  if (node.meta(0).dtype != at::kFloat) {
    return {};
  }
  return HostResults{draw_unit(node.seed, node.meta(0).sizes)};
}

// A draw of any other operator is its rule's.
const std::unordered_map<std::string, AlternateKernel>& alternate_kernels() {
  static const auto* const all = new std::unordered_map<std::string, AlternateKernel>{
      {"aten._scaled_dot_product_fused_attention_overrideable.default", &attention},
      {"aten._scaled_dot_product_fused_attention_overrideable_backward.default", &attention_backward},
      {"aten.linear_backward.default", &linear_backward},
      {"aten.bernoulli.p", &bernoulli},
      {"aten.native_dropout.default", &dropout},
      {"aten.rand.default", &uniform},
      {"aten.rand.generator", &uniform},
      {"aten.rand_like.default", &uniform},
      {"aten.rand_like.generator", &uniform},
  };
  return *all;
}

// Threefry-2x32 of a counter, both words of the result in one.
class Threefry {
 public:
  explicit Threefry(uint64_t key)
      : keys_{static_cast<uint32_t>(key >> 32), static_cast<uint32_t>(key),
              static_cast<uint32_t>(key >> 32) ^ static_cast<uint32_t>(key) ^ 0x1BD11BDAU} {}

  uint32_t operator()(uint64_t counter) const {
    constexpr int kRotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
    uint32_t a = static_cast<uint32_t>(counter >> 32) + keys_[0];
    uint32_t b = static_cast<uint32_t>(counter) + keys_[1];
    for (uint32_t round = 0; round < 5; ++round) {
      for (const int by : kRotations[round % 2]) {
        a += b;
        b = std::rotl(b, by) ^ a;
      }
      a += keys_[(round + 1) % 3];
      b += keys_[(round + 2) % 3] + round + 1;
    }
    return a ^ b;
  }

 private:
  const uint32_t keys_[3];
};

}  // namespace

at::Tensor draw_unit(const int64_t seed[2], c10::IntArrayRef sizes) {
  constexpr int64_t kGrain = 1 << 15;
  const Threefry threefry(random_key(seed[0], seed[1]));
  auto drawn = at::empty(sizes, at::kFloat);
  auto* const to = drawn.data_ptr<float>();
  at::parallel_for(0, drawn.numel(), kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      to[i] = std::bit_cast<float>(threefry(static_cast<uint64_t>(i)) >> 9 | 0x3F800000U) - 1.0F;
    }
  });
  return drawn;
}

namespace {

// Whether all indices are from 0 to the one before the end, or this one.
bool are_within(const c10::IValue& v, int64_t end, std::optional<int64_t> ignored = std::nullopt) {
  auto indices = v.toTensor();
  if (indices.numel() == 0) {
    return true;
  }
  if (ignored) {
    indices = indices.masked_select(indices.ne(*ignored));
    if (indices.numel() == 0) {
      return true;
    }
  }
  const auto [least, most] = indices.aminmax();
  return least.item<int64_t>() >= 0 && most.item<int64_t>() < end;
}

// How many elements the last dimensions have.
int64_t elements_of(const c10::IValue& v, int64_t dims) {
  const auto sizes = v.toTensor().sizes();
  return c10::multiply_integers(sizes.slice(sizes.size() - dims));
}

bool labels_fit(const HostStack& a) {
  const auto& x = a[1].toTensor();
  return are_within(a[2], x.size(x.dim() == 1 ? 0 : 1), a[5].toInt());
}

bool bags_fit(const HostStack& a) {
  const auto& offsets = a[2].toTensor();
  return are_within(offsets, a[1].toTensor().numel() + 1) && (offsets.diff() >= 0).all().item<bool>();
}

bool is_never_sure(const HostStack& /*arguments*/) { return false; }

// Kernels that go wherever their indices or lengths say, and whether these are within what they are of. Which they are
// is found by trial: `tests/run/test_unchecked_kernels.py`.
const std::unordered_map<std::string, BoundsCheck>& bounds_checks() {
  static const auto* const all = new std::unordered_map<std::string, BoundsCheck>{
      {"aten._ctc_loss.default", &is_never_sure},
      {"aten._ctc_loss.Tensor", &is_never_sure},
      {"aten._ctc_loss_backward.default", &is_never_sure},
      {"aten._ctc_loss_backward.Tensor", &is_never_sure},
      {"aten._embedding_bag.default", &bags_fit},
      {"aten._embedding_bag_forward_only.default", &bags_fit},
      {"aten._embedding_bag_backward.default", &is_never_sure},
      {"aten._embedding_bag_per_sample_weights_backward.default", &is_never_sure},
      {"aten._segment_reduce_backward.default", &is_never_sure},
      {"aten._sparse_mm_reduce_impl_backward.default", &is_never_sure},
      {"aten.adaptive_max_pool2d_backward.default",
       [](const HostStack& a) { return are_within(a[2], elements_of(a[1], 2)); }},
      {"aten.adaptive_max_pool3d_backward.default",
       [](const HostStack& a) { return are_within(a[2], elements_of(a[1], 3)); }},
      {"aten.embedding_dense_backward.default", [](const HostStack& a) { return are_within(a[1], a[2].toInt()); }},
      {"aten.max_pool2d_with_indices_backward.default",
       [](const HostStack& a) { return are_within(a[7], elements_of(a[1], 2)); }},
      {"aten.max_pool3d_with_indices_backward.default",
       [](const HostStack& a) { return are_within(a[7], elements_of(a[1], 3)); }},
      {"aten.nll_loss2d_backward.default", &labels_fit},
      {"aten.nll_loss_backward.default", &labels_fit},
      {"aten.segment_reduce.default", &is_never_sure},
  };
  return *all;
}

template <class Table>
typename Table::mapped_type find_or_null(const Table& table, const std::string& name) {
  const auto it = table.find(name);
  return it == table.end() ? nullptr : it->second;
}

}  // namespace

std::vector<std::string> unchecked_index_operators() {
  std::vector<std::string> names;
  for (const auto& [name, fits] : bounds_checks()) {
    names.push_back(name);
  }
  return names;
}

bool stays_in_bounds(const std::string& name, const HostStack& arguments) {
  const auto check = find_or_null(bounds_checks(), name);
  return check == nullptr || check(arguments);
}

std::optional<HostStack> in_float(const HostStack& arguments) {
  bool any = false;
  HostStack widened;
  for (const auto& v : arguments) {
    const bool is_short =
        v.isTensor() && v.toTensor().defined() && at::isReducedFloatingType(v.toTensor().scalar_type());
    widened.push_back(is_short ? c10::IValue(v.toTensor().to(at::kFloat)) : v);
    any = any || is_short;
  }
  return any ? std::optional<HostStack>(std::move(widened)) : std::nullopt;
}

namespace {

bool is_floating(const Tensor& t) { return t.is_floating_point() || t.is_complex(); }

bool is_number(const Tensor& t) { return t.unsafeGetTensorImpl()->is_wrapped_number(); }

// What an operator's promotion depends on, of its arguments.
struct Promotion {
  Promotion(const c10::FunctionSchema& schema, const HostStack& arguments) {
    for (size_t p = 0; p < arguments.size(); ++p) {
      const auto& v = arguments[p];
      const auto& argument = schema.arguments()[p];
      decided = decided || (argument.name() == "dtype" && !v.isNone());
      for_each_tensor(v, [&](const Tensor& t) { note(t); });
      if (argument.real_type()->kind() == c10::TypeKind::NumberType) {
        number = number || v.isDouble() || v.isComplexDouble();
      }
    }
  }

  void note(const Tensor& t) {
    decided = decided || (is_floating(t) && !is_number(t));
    number_as_tensor = number_as_tensor || (is_floating(t) && is_number(t));
  }

  bool decided = false;           // by a floating tensor, or in words
  bool number = false;            // some floating one takes part
  bool number_as_tensor = false;  // in the place of a tensor
};

bool is_product(const std::string& name) {
  return name == "aten.addmm.default" || name == "aten.bmm.default" || name == "aten.linear.default" ||
         name == "aten.linear_backward.default" || name == "aten.mm.default";
}

HostOperator describe(const OpInfo& op) {
  HostOperator host;
  host.alternate = find_or_null(alternate_kernels(), op.name);
  host.stays_in_bounds = find_or_null(bounds_checks(), op.name);
  host.in_aten = op.name.rfind("aten.", 0) == 0;
  host.pointwise = op.op.hasTag(at::Tag::pointwise);
  host.addresses = op.form == Form::AsStrided || op.form == Form::AsStridedScatter;
  host.takes_strides = op.view ? !host.addresses && op.inverse != Inverse::Memory && op.inverse != Inverse::Complex &&
                                     op.inverse != Inverse::Bitcast
                               : host.pointwise || is_product(op.name);
  return host;
}

// Whether an argument is the type of a tensor that is made, which is left out where an out= tensor has decided it.
bool makes_of_type(const c10::FunctionSchema& schema, size_t position) {
  const auto& arguments = schema.arguments();
  return position + 1 < arguments.size() && arguments[position].name() == "dtype" &&
         arguments[position + 1].name() == "layout";
}

}  // namespace

void promote_as_recorded(const Node& node, HostStack& arguments) {
  const auto dtype = default_dtype(node.settings);
  bool gives_default = false, gives_bool = false;
  for (const auto& meta : node.outs->metas) {
    gives_default = gives_default || at::toRealValueType(meta.dtype) == dtype;
    gives_bool = gives_bool || meta.dtype == at::kBool;
  }
  if (node.op->view || !(gives_default || gives_bool)) {
    return;
  }
  const Promotion promotion(node.op->op.schema(), arguments);
  if (promotion.decided || !(gives_default || promotion.number || promotion.number_as_tensor)) {
    return;
  }
  const auto promoted = [&](const Tensor& t) {
    // A number that has that type decides for what it meets, such as what a mask selects from.
    if (is_number(t) != promotion.number_as_tensor || is_floating(t) != promotion.number_as_tensor) {
      return t;
    }
    return t.to(t.is_complex() ? at::toComplexType(dtype) : dtype, /*non_blocking=*/false, /*copy=*/true);
  };
  for (auto& v : arguments) {
    if (!v.isOptionalTensorList()) {  // indices
      v = with_tensors(v, promoted);
    }
  }
}

const HostOperator& host_operator(const OpInfo& op) {
  const auto* host = op.on_host.load(std::memory_order_acquire);
  if (host == nullptr) {  // two threads may both make one, and one stays unused
    host = new HostOperator(describe(op));
    op.on_host.store(host, std::memory_order_release);
  }
  return *host;
}

c10::IValue constant_argument(const Node& node, size_t position) {
  const auto& value = node.args[position].value;
  if (value.isDevice()) {
    return c10::Device(c10::kCPU);
  }
  const auto& schema = node.op->op.schema();
  if (value.isNone() && makes_of_type(schema, position)) {
    return node.meta(0).dtype;
  }
  if (value.isScalar() && schema.arguments()[position].real_type()->isSubtypeOf(*c10::TensorType::get())) {
    auto number = at::scalar_tensor(value.toScalar(), value.toScalar().type());
    number.unsafeGetTensorImpl()->set_wrapped_number(true);
    return number;
  }
  return value;
}

}  // namespace torch_xla
