// Leaves whose values are in the host's memory, as tensors of PyTorch's CPU.
#pragma once
#include <ATen/core/Tensor.h>

#include "ir/node.h"

namespace torch_xla {

// The values of a leaf, where they are: the tensor's memory is the buffer's. Waits for the program that makes them and
// raises what that has to say; `input` is the leaf's number, for messages.
at::Tensor values_of(const NodePtr& leaf, size_t input, c10::DeviceIndex device);

}  // namespace torch_xla
