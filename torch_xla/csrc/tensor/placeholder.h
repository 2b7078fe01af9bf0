// Tensors without values: they are there to be traced, for another machine perhaps.
#pragma once
#include <ATen/core/Tensor.h>

#include "ir/node.h"

namespace torch_xla {

at::Tensor make_placeholder(const MetaRef& meta, c10::DeviceIndex device);
bool is_placeholder(const at::Tensor& tensor);
// Whether there are any.
bool any_placeholders();

// Raises why a leaf has no value, where it has none. One that a replay computes has one for what is captured.
void check_value(const Node& leaf, c10::DeviceIndex device);

}  // namespace torch_xla
