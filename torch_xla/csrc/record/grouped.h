// Grouped products: rows of one matrix by as many others as there are groups, as layers of experts take them.
#pragma once
#include <ATen/core/ivalue.h>

#include "ir/node.h"

namespace torch_xla {

// The shape of what `_grouped_mm` gives for these arguments, which are checked as its CPU kernel does: PyTorch's Meta
// kernel takes bfloat16 only.
MetaSetPtr grouped_product(c10::ArrayRef<c10::IValue> arguments);

}  // namespace torch_xla
