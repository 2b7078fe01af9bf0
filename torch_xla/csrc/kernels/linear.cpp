// Linear layers stay one operator, and so does their backward pass: PyTorch takes them apart into views, products and
// sums for every device that has no kernel of its own.
#include <ATen/ATen.h>
#include <ATen/ops/linear_backward_ops.h>
#include <ATen/ops/linear_native.h>
#include <ATen/ops/linear_ops.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <algorithm>

#include "tensor/tensor_impl.h"

namespace torch_xla {

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;

// Dispatch modes, tensor subclasses and function transforms know the parts, and may not know the whole.
constexpr DispatchKeySet kTransforms =
    c10::python_ks | DispatchKeySet({DispatchKey::FuncTorchDynamicLayerBackMode, DispatchKey::Functionalize});

bool has_tangent(const Tensor& t) { return t.defined() && t._fw_grad(/*level=*/0).defined(); }

// Whether only AOTAutograd sees the call, if any does: it keeps operators whole that a device has.
bool is_undecomposed(DispatchKeySet keys, std::initializer_list<const Tensor*> tensors) {
  if (!keys.has_any(kTransforms)) {
    return true;
  }
  const py::gil_scoped_acquire gil;
  return c10::python_ks.has_all(keys & kTransforms) &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set(/*skip_infra_modes=*/true) &&
         std::all_of(tensors.begin(), tensors.end(), [](const Tensor* t) {
           const auto object = py::reinterpret_steal<py::object>(THPVariable_Wrap(*t));
           return object.is_none() || Py_TYPE(object.ptr())->tp_name == std::string("FunctionalTensor");
         });
}

// PyTorch's derivatives of the whole operators, which the dispatcher offers to nested tensors only.
DispatchKeySet derivatives(DispatchKeySet keys) {
  return (keys & c10::after_autograd_keyset).add(DispatchKey::AutogradNestedTensor);
}

Tensor linear(DispatchKeySet keys, const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias) {
  const auto addend = at::borrow_from_optional_tensor(bias);
  const bool biased = addend->defined();
  const bool tangents = has_tangent(input) || has_tangent(weight) || has_tangent(*addend);
  // Of complex numbers those derivatives leave the conjugates out.
  const bool undecomposed = !tangents && is_xla(input) && is_xla(weight) && input.dim() > 0 && weight.dim() == 2 &&
                            (!biased || (is_xla(*addend) && addend->dim() == 1)) && !weight.is_complex() &&
                            is_undecomposed(keys, {&input, &weight, &*addend});
  if (tangents && input.dim() == 1 && weight.dim() == 2 && input.size(0) == weight.size(1)) {
    // PyTorch makes a matrix of the vector, and of a tangent that is batched it then keeps that form.
    return biased ? at::addmv(*addend, weight, input) : at::mv(weight, input);
  }
  return undecomposed ? at::_ops::linear::redispatch(derivatives(keys), input, weight, bias)
                      : at::native::linear(input, weight, bias);
}

// The gradients as operators that have tangents and batching rules.
std::tuple<Tensor, Tensor, Tensor> linear_backward(DispatchKeySet keys, const Tensor& input, const Tensor& grad,
                                                   const Tensor& weight, std::array<bool, 3> output_mask) {
  if (!has_tangent(input) && !has_tangent(grad) && !has_tangent(weight) &&
      is_undecomposed(keys, {&input, &grad, &weight})) {
    return at::_ops::linear_backward::redispatch(derivatives(keys), input, grad, weight, output_mask);
  }
  const auto matrix = [](const Tensor& t) { return t.dim() == 1 ? t.unsqueeze(0) : t.flatten(0, -2); };
  const auto rows = matrix(grad);
  return {output_mask[0] ? grad.matmul(weight) : Tensor(), output_mask[1] ? rows.t().mm(matrix(input)) : Tensor(),
          output_mask[2] ? rows.sum(0) : Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, AutogradXLA, m) {
  m.impl("linear", TORCH_FN(linear));
  m.impl("linear_backward", TORCH_FN(linear_backward));
}

}  // namespace torch_xla
