// Attention stays one operator: PyTorch's choice of a fused kernel knows no device xla and would take it apart.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <cmath>

#include "tensor/tensor_impl.h"

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
  if (masked && (is_causal || !is_xla(*mask) || mask->requires_grad())) {
    return false;
  }
  // As PyTorch asks: a vector has no such dimension; what fits in no other way is broadcast, or refused, by others.
  const auto fits = [&](int64_t dim, int64_t size) { return mask->size(dim) == 1 || mask->size(dim) == size; };
  return query.size(0) == key.size(0) && key.size(0) == value.size(0) && query.size(3) == key.size(3) &&
         key.size(2) == value.size(2) && key.size(1) == value.size(1) && query.scalar_type() == key.scalar_type() &&
         key.scalar_type() == value.scalar_type() && key.size(1) > 0 && query.size(1) % key.size(1) == 0 &&
         (enable_gqa || query.size(1) == key.size(1)) &&
         (!masked || (fits(-2, query.size(2)) && fits(-1, key.size(2)) &&
                      (mask->dim() == 2 || (mask->dim() == 4 && fits(0, query.size(0)) && fits(1, query.size(1))))));
}

// Leading dimensions as two, batch and heads.
Tensor four_dims(const Tensor& t) {
  return t.dim() < 4 ? t.reshape({t.dim() == 3 ? t.size(0) : 1, 1, t.size(-2), t.size(-1)}) : t.flatten(0, -4);
}

// The mask beside tensors of four dimensions; nothing where it does not broadcast in that way.
std::optional<Tensor> four_dims_mask(const std::optional<Tensor>& mask, const Tensor& query) {
  if (!mask || !mask->defined() || mask->dim() == 2 || query.dim() == 4) {
    return mask;
  }
  auto sizes = query.sizes().slice(0, query.dim() - 2).vec();
  sizes.insert(sizes.end(), mask->sizes().end() - std::min<int64_t>(mask->dim(), 2), mask->sizes().end());
  const bool broadcasts = mask->dim() == query.dim() && at::is_expandable_to(mask->sizes(), sizes);
  return broadcasts ? std::make_optional(four_dims(mask->expand(sizes))) : std::nullopt;
}

Tensor attend(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
              double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  TORCH_CHECK(query.scalar_type() == key.scalar_type() && query.scalar_type() == value.scalar_type(),
              "Expected query, key, and value to have the same dtype, but got query.dtype: ", query.dtype(),
              " key.dtype: ", key.dtype(), " and value.dtype: ", value.dtype(), " instead.");
  TORCH_CHECK(query.dim() >= 2 && key.dim() >= 2 && value.dim() >= 2,
              "Expected query, key, and value to all be  at least 2 dimensional, but got query.dim: ", query.dim(),
              " key.dim: ", key.dim(), " and value.dim: ", value.dim(), " instead.");
  const bool masked = mask && mask->defined();
  TORCH_CHECK(!masked || mask->scalar_type() == at::kBool || mask->scalar_type() == at::kFloat ||
                  mask->scalar_type() == query.scalar_type(),
              "Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: ",
              mask->dtype(), " and  query.dtype: ", query.dtype(), " instead.");
  if (masked && is_causal && dropout_p == 0 && fused(query, key, value, mask, /*is_causal=*/false, enable_gqa)) {
    const auto later = at::ones({query.size(-2), key.size(-2)}, query.options().dtype(at::kBool)).triu_(1);
    return attend(query, key, value, additive(mask, query.scalar_type())->masked_fill(later, -INFINITY), dropout_p,
                  /*is_causal=*/false, scale, enable_gqa);
  }
  const auto dims = query.dim();
  const bool alike = key.dim() == dims && value.dim() == dims && dims != 4 && !enable_gqa && is_xla(query) &&
                     query.numel() > 0 && key.numel() > 0 && value.numel() > 0 &&
                     query.sizes().slice(0, dims - 2) == key.sizes().slice(0, dims - 2) &&
                     query.sizes().slice(0, dims - 2) == value.sizes().slice(0, dims - 2);
  if (alike) {
    const auto mask4 = four_dims_mask(mask, query);
    const auto q = four_dims(query);
    const auto k = four_dims(key);
    const auto v = four_dims(value);
    if (mask4.has_value() == mask.has_value() && fused(q, k, v, mask4, is_causal, enable_gqa)) {
      auto sizes = query.sizes().vec();
      sizes.back() = value.size(-1);
      return attend(q, k, v, mask4, dropout_p, is_causal, scale, enable_gqa).reshape(sizes);
    }
  }
  if ((masked && mask->dim() < 2 && dropout_p > 0) || !fused(query, key, value, mask, is_causal, enable_gqa)) {
    return std::get<0>(at::_scaled_dot_product_attention_math(query, key, value, additive(mask, query.scalar_type()),
                                                              dropout_p, is_causal, std::nullopt, scale, enable_gqa));
  }
  return std::get<0>(at::_scaled_dot_product_fused_attention_overrideable(query, key, value, mask, dropout_p, is_causal,
                                                                          false, scale));
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, AutogradXLA, m) { m.impl("scaled_dot_product_attention", TORCH_FN(attend)); }
TORCH_LIBRARY_IMPL(aten, XLA, m) { m.impl("scaled_dot_product_attention", TORCH_FN(attend)); }

}  // namespace torch_xla
