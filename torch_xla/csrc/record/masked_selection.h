// Operators whose results have as many elements as a mask selects: recorded like others where that number is a matter
// of the data, not of the computation.
#pragma once
#include <ATen/core/stack.h>

#include "ir/op_info.h"

namespace torch_xla {

// Records `index` by masks, `masked_select` or `nonzero`, and puts the result on the stack in place of the arguments.
// False where the operator is another one, or runs better on the host.
bool record_selected(const OpInfo& info, torch::jit::Stack& stack);

}  // namespace torch_xla
