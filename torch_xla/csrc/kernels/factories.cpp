// Ranges into a tensor that is there. As on CPU, one with as many elements keeps its shape and is filled row by row,
// and any other gets one dimension.
#include <ATen/ATen.h>
#include <ATen/native/Resize.h>
#include <torch/library.h>

#include "record/record.h"

namespace torch_xla {

namespace {

void fill_by_rows(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto out = stack->back().toTensor();
  if (out.dim() == 1) {
    record(op, stack);
    return;
  }
  stack->back() = at::empty({0}, out.options());
  record(op, stack);
  const auto values = stack->back().toTensor();
  if (out.numel() != values.numel()) {
    at::native::resize_output(out, values.sizes());
  }
  out.copy_(values.view(out.sizes()));
  stack->back() = out;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, XLA, m) {
  for (const auto* name : {"arange.start_out", "range.out", "linspace.out", "logspace.out"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fill_by_rows>());
  }
}

}  // namespace torch_xla
