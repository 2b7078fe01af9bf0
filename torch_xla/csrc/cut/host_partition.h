// Graphs that differ from known ones only in small parts that grow, such as token ids and positions: the host computes
// these parts, and the rest is one graph whatever their shapes.
#pragma once
#include <optional>

#include "cut/graph.h"

namespace torch_xla {

// What to run instead of a graph, in this order; then it is cut again, and what is left of it is a small part too.
struct HostPartition {
  Cut before;  // small, and needs nothing of the rest; without values where there is nothing of this kind
  Cut device;
};

// Divides a graph that has no program and was cut for `what`. Returns none as long as its rest was met with the same
// small parts only: the graph is then compiled whole, and its rest is remembered.
std::optional<HostPartition> partition_for_host(const Graph& graph, const Cut& what);

// Whether the host may compute all of a graph as such a part.
bool fits_host_partition(const Graph& graph);

void forget_host_partitions();

}  // namespace torch_xla
