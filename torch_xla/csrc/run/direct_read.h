// Reading a value without the stages, where few operators make it.
#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <utility>

namespace torch_xla {

// A copy of a tensor's values, where they are on the host or a few operators of what is there give them: computed with
// PyTorch's CPU kernels, as a graph behind a read is, but without Python code between. Nothing where it takes more than
// that; the tensor is then as it was. Under the GIL, where nothing else is cut meanwhile.
// With it, whether they were computed now.
std::optional<std::pair<at::Tensor, bool>> read_directly(const at::Tensor& tensor);

}  // namespace torch_xla
