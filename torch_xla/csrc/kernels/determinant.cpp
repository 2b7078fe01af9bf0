#include <ATen/ATen.h>
#include <torch/library.h>

#include "record/record.h"

namespace torch_xla {

namespace {

// PyTorch's gradient of a determinant expects the factors of the transpose where the matrix is real and contiguous, and
// of the matrix itself where it is not. The rule gives the former, and a program does not know strides.
void determinant(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto a = stack->back().toTensor();
  if (a.dim() >= 2 && a.size(-1) == a.size(-2) && !a.is_complex() && !a.is_contiguous()) {
    stack->back() = a.mT();
  }
  record(op, stack);
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, XLA, m) {
  m.impl("_linalg_det", torch::CppFunction::makeFromBoxedFunction<&determinant>());
  m.impl("_linalg_slogdet", torch::CppFunction::makeFromBoxedFunction<&determinant>());
}

}  // namespace torch_xla
