// Layouts that the device does not have. PyTorch would answer with all dispatch keys that have a kernel, a page of
// them.
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

}  // namespace

TORCH_LIBRARY_IMPL(_, SparseXLA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_sparse>()); }
TORCH_LIBRARY_IMPL(_, SparseCsrXLA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_sparse>()); }
TORCH_LIBRARY_IMPL(_, NestedTensorXLA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&refuse_nested>()); }

}  // namespace torch_xla
