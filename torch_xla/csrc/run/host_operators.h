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

using AlternateKernel = std::optional<HostResults> (*)(const Node&, const HostStack&);
using BoundsCheck = bool (*)(const HostStack&);

// How the CPU runs an operator, read once from its name, schema and tags.
struct HostOperator {
  // The results of an operator that the CPU has under another name, or that draws: as the rule of a program does, bit
  // for bit. No value where the call has to be computed otherwise. Null for all others.
  AlternateKernel alternate;
  // Whether the kernel stays within what it is given. Some go wherever their indices or lengths say, which the kernel
  // of their forward has checked, and neither its rule nor a program did. Null for all others.
  BoundsCheck stays_in_bounds;
  bool in_aten;  // of others' operators a rule knows whether they are calls of their kernels
  bool pointwise;
  // It means places of its input's memory, which begin where the node's value does.
  bool addresses;
  // It takes inputs with any strides, and means their elements. Many others read memory as if it were in order, because
  // who calls them sees to that, or address it.
  bool takes_strides;
};
const HostOperator& host_operator(const OpInfo& op);

// As in `HostOperator`, of an operator by its name.
bool stays_in_bounds(const std::string& name, const HostStack& arguments);
// Those of which this is not always so.
std::vector<std::string> unchecked_index_operators();

// The arguments of a kernel that may not take 16-bit numbers, or not beside statistics in float32. Its results are
// rounded, as a rule's are.
std::optional<HostStack> in_float(const HostStack& arguments);

// Makes the arguments of a kernel such that it does not read the default dtype, which is the process's and may be
// another than at the call: integers that it would promote to that one become numbers of the recorded one.
void promote_as_recorded(const Node& node, HostStack& arguments);

// The value of an argument that is no tensor of the graph, as the node's kernel takes it.
c10::IValue constant_argument(const Node& node, size_t position);

// Numbers in [0, 1), float32: those that `jax.random.uniform` draws from the key of a node's seed.
at::Tensor draw_unit(const int64_t seed[2], c10::IntArrayRef sizes);

}  // namespace torch_xla
