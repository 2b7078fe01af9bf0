// Graphs that differ from earlier ones only in small parts that grow, such as token ids and positions: the host
// computes these parts, and the device's part is one graph whatever their shapes.
#pragma once
#include <optional>

#include "cut/graph.h"

namespace torch_xla {

// What to run instead of a graph, in this order; then it is cut again, and only small operators are left for the host.
struct HostPartition {
  Cut before;  // for the host, and needs nothing of the device's part; without values where there is none
  Cut device;
};

// Partitions a graph that has no program and was cut for `what`. Returns none as long as its device part has come with
// the same host parts only: the graph is then compiled as it is, and its device part is remembered.
std::optional<HostPartition> partition_for_host(const Graph& graph, const Cut& what);

// Whether the host may compute the whole graph as such a part.
bool fits_host_partition(const Graph& graph);

void forget_host_partitions();

}  // namespace torch_xla
