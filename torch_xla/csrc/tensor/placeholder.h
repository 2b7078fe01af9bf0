// Tensors without values: they are there to be traced, for another machine perhaps.
#pragma once
#include <ATen/core/Tensor.h>

#include "ir/node.h"

namespace torch_xla {

at::Tensor make_placeholder(const MetaRef& meta, c10::DeviceIndex device);
bool is_placeholder(const at::Tensor& tensor);
bool is_placeholder(const Node& leaf);
// Whether there are any.
bool any_placeholders();

}  // namespace torch_xla
