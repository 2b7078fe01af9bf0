// What a node computes on the CPU, where that is not a call of the operator's own kernel.
#pragma once
#include <ATen/ATen.h>

#include <optional>
#include <string>
#include <vector>

#include "ir/node.h"

namespace torch_xla {

// The values of a node's arguments, in the order of the schema.
using HostStack = std::vector<c10::IValue>;
using HostResults = c10::SmallVector<at::Tensor, 2>;

// Whether there may be some from the function below.
bool has_alternate_kernel(const Node& node);
// The results of an operator that the CPU has under another name, or that draws: as the rule of a program does, bit for
// bit. Nothing where it has to go another way.
std::optional<HostResults> compute_by_alternate_kernel(const Node& node, const HostStack& arguments);

// Whether the kernel of an operator stays within what it is given. Some go wherever their indices or lengths say, which
// the kernel of their forward has checked, and neither its rule nor a program did.
bool stays_in_bounds(const std::string& name, const HostStack& arguments);
// Those of which this is not always so.
std::vector<std::string> unchecked_index_operators();

// Whether an operator means places of its input's memory, which begin where the node's value does.
bool addresses(const OpInfo& op);
// Whether a kernel takes inputs with any strides, and means their elements. Many others read memory as if it were in
// order, because who calls them sees to that, or address it.
bool takes_strides(const OpInfo& op);

// The arguments of a kernel that may not take 16-bit numbers, or not beside statistics in float32. Its results are
// rounded, as a rule's are.
std::optional<HostStack> in_float(const HostStack& arguments);

// Makes the arguments of a kernel such that it does not read the default dtype, which is the process's and may be
// another than at the call: integers that it would promote to that one become numbers of the recorded one.
void promote_as_recorded(const Node& node, HostStack& arguments);

// Numbers in [0, 1), float32: those that `jax.random.uniform` draws from the key of a node's seed.
at::Tensor draw_unit(const int64_t seed[2], c10::IntArrayRef sizes);

}  // namespace torch_xla
