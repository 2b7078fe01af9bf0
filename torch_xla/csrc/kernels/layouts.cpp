// Layouts that the device does not have. PyTorch would answer with all dispatch keys that have a kernel, a page of
// them.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

namespace torch_xla {

namespace {

[[noreturn]] void refuse(const c10::OperatorHandle& op, const char* layout, const char* instead) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "[layout] got ", op.operator_name().name, " for a ", layout,
                              " tensor on device xla, expected strided tensors; ", instead,
                              ", or compute it on the CPU");
}

void refuse_sparse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  refuse(op, "sparse", "make it dense before it goes there (to_dense(), sparse=False)");
}

void refuse_nested(const c10::OperatorHandle& op, torch::jit::Stack*) {
  refuse(op, "nested", "make it with layout=torch.jagged");
}

// What makes a nested tensor with strides; attention of jagged ones does, and calls something else on
// NotImplementedError.
void refuse_to_nest(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK(
      false, "[layout] got ", op.operator_name().name,
      " on device xla, which makes a nested tensor with strides, "
      "expected layout=torch.jagged; for attention pad that (torch.nested.to_padded_tensor) and give a mask, or "
      "compute it on the CPU");
}

// Gradients that would be sparse elsewhere are dense here, as torch_xla 2 has those of embedding bags: most optimizers
// take either, with equal results.
at::Tensor embedding_backward(const at::Tensor& grad, const at::Tensor& indices, int64_t rows, int64_t padding_idx,
                              bool scale_grad_by_freq) {
  TORCH_CHECK(!scale_grad_by_freq, "embedding_backward: scale_grad_by_freq not supported with sparse gradients");
  return at::embedding_dense_backward(grad, indices, rows, padding_idx, scale_grad_by_freq);
}

at::Tensor gather_backward(const at::Tensor& self, int64_t dim, const at::Tensor& index, const at::Tensor& grad) {
  return grad.new_zeros(self.sizes()).scatter_add(dim, index, grad);
}

void register_gradients(torch::Library& m) {
  m.impl("embedding_sparse_backward", TORCH_FN(embedding_backward));
  m.impl("_gather_sparse_backward", TORCH_FN(gather_backward));
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, XLA, m) {
  register_gradients(m);
  for (const auto* const makes :
       {"_nested_from_padded", "_nested_from_padded_and_nested_example", "_nested_tensor_from_mask",
        "_nested_tensor_from_tensor_list", "_nested_view_from_buffer"}) {
    m.impl(makes, torch::CppFunction::makeFromBoxedFunction<&refuse_to_nest>());
  }
}
TORCH_LIBRARY_IMPL(aten, AutogradXLA, m) { register_gradients(m); }
TORCH_LIBRARY_IMPL(_, SparseXLA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_sparse>()); }
TORCH_LIBRARY_IMPL(_, SparseCsrXLA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_sparse>()); }
TORCH_LIBRARY_IMPL(_, NestedTensorXLA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_nested>()); }

namespace {
void note_replacement(const at::Tensor& /*replaced*/, const at::Tensor& /*by*/) {}
}  // namespace

// Functionalization tells devices of type xla which tensor replaces another; under vmap too, which has no rule for it.
TORCH_LIBRARY_IMPL(aten, FuncTorchBatched, m) { m.impl("_propagate_xla_data", TORCH_FN(note_replacement)); }

}  // namespace torch_xla
