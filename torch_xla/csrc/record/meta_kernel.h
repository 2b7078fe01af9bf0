// PyTorch's shape functions: ATen's own in C++ where it has one, which the CPU kernel shares, else those in Python.
#pragma once
#include <ATen/core/stack.h>

#include "ir/op_info.h"

namespace torch_xla {

bool is_aten(const OpInfo& info);

// Calls an operator's Meta kernel. PyTorch puts one in Python over most of ATen's, for symbolic sizes, which takes a
// hundred times as long and has promotion rules of its own: it is called where the shape cannot be told without.
void call_meta_kernel(const OpInfo& info, torch::jit::Stack& stack);

}  // namespace torch_xla
