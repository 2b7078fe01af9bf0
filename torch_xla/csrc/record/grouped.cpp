#include "record/grouped.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/GroupedMMUtils.h>

namespace torch_xla {

namespace {

at::Tensor twin(const at::Tensor& t) { return at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type()); }

std::optional<at::Tensor> optional_twin(const c10::IValue& v) {
  return v.isNone() ? std::nullopt : std::optional<at::Tensor>(twin(v.toTensor()));
}

}  // namespace

MetaSetPtr grouped_product(c10::ArrayRef<c10::IValue> arguments) {
  const auto a = twin(arguments[0].toTensor());
  const auto b = twin(arguments[1].toTensor());
  const auto ends = optional_twin(arguments[2]);
  const auto wanted = arguments[4].toOptional<at::ScalarType>();
  at::native::_grouped_mm_validate_inputs(a, b, ends, optional_twin(arguments[3]), wanted);
  const auto type = at::native::_resolve_grouped_mm_out_dtype(a, b, wanted);
  const auto out = at::native::create_grouped_gemm_output_tensor(a, b, ends, type);
  return contiguous_meta(out.sizes(), type).set;
}

}  // namespace torch_xla
