// The module that an operator belongs to, kept with XLA_HLO_DEBUG=1 only.
#pragma once
#include <string>

namespace torch_xla {

// A path such as "Model/encoder/layer_3", one object per path for the life of the process; null for none.
using Scope = const std::string*;

// Makes it the path of what the calling thread records from now on; empty for none.
void set_scope(const std::string& path);
Scope scope_of(const std::string& path);

// The path of what is being recorded: the thread's, or in a backward pass that of the forward operator.
Scope recorded_scope();

}  // namespace torch_xla
