// Attention stays one operator: PyTorch's choice of a fused kernel knows no device xla and would take it apart.
#include <ATen/ATen.h>
#include <torch/library.h>

#include "tensor_impl.h"

namespace torch_xla {

namespace {

using at::Tensor;

// A mask of booleans as one to be added.
std::optional<Tensor> additive(const std::optional<Tensor>& mask, at::ScalarType dtype) {
  if (!mask || !mask->defined() || mask->scalar_type() != at::kBool) {
    return mask;
  }
  return at::zeros_like(*mask, mask->options().dtype(dtype))
      .masked_fill_(mask->logical_not(), -std::numeric_limits<double>::infinity());
}

bool fused(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
           bool is_causal, bool enable_gqa) {
  const auto plain = [](const Tensor& t) { return is_xla(t) && t.dim() == 4 && t.is_floating_point(); };
  if (!plain(query) || !plain(key) || !plain(value)) {
    return false;
  }
  const bool masked = mask && mask->defined();
  if (masked && (is_causal || !is_xla(*mask) || mask->requires_grad() || mask->dim() > 4)) {
    return false;
  }
  return query.size(0) == key.size(0) && key.size(0) == value.size(0) && query.size(3) == key.size(3) &&
         key.size(2) == value.size(2) && key.size(1) == value.size(1) && query.scalar_type() == key.scalar_type() &&
         key.scalar_type() == value.scalar_type() && key.size(1) > 0 && query.size(1) % key.size(1) == 0 &&
         (enable_gqa || query.size(1) == key.size(1));
}

Tensor scaled_dot_product_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                    const std::optional<Tensor>& mask, double dropout_p, bool is_causal,
                                    std::optional<double> scale, bool enable_gqa) {
  if (!fused(query, key, value, mask, is_causal, enable_gqa)) {
    return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, additive(mask, query.scalar_type()),
                                                              dropout_p, is_causal, std::nullopt, scale, enable_gqa));
  }
  return std::get<0>(at::_scaled_dot_product_fused_attention_overrideable(query, key, value, mask, dropout_p, is_causal,
                                                                          false, scale));
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, AutogradXLA, m) {
  m.impl("scaled_dot_product_attention", TORCH_FN(scaled_dot_product_attention));
}
TORCH_LIBRARY_IMPL(aten, XLA, m) { m.impl("scaled_dot_product_attention", TORCH_FN(scaled_dot_product_attention)); }

}  // namespace torch_xla
