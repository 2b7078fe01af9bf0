// Kernels that take their arguments as PyTorch passes them, for the operators that programs call most.
#pragma once
#include <string>
#include <unordered_set>

namespace torch_xla {

// The operators that have one, such as "aten::add.Tensor". They are plain ones and views: no lists of tensors, and
// shapes that the arguments tell.
const std::unordered_set<std::string>& unboxed_kernels();

}  // namespace torch_xla
