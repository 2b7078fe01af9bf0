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

// The leaf of a tensor that was made while a graph was captured: a replay gives it its value. Until then it is lost,
// but for what is captured.
Value make_uncomputed(const MetaRef& meta);
// Raises why a leaf has no value, where it has none.
void check_value(const Node& leaf, c10::DeviceIndex device);

}  // namespace torch_xla
