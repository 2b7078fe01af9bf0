#include "cut/host_partition.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <unordered_map>
#include <vector>

#include "ir/host_cost.h"
#include "ir/op_info.h"
#include "loops/call_trace.h"

namespace torch_xla {

namespace {

constexpr std::array<int64_t, 3> kValues = {4096, 512, 64};  // of one result
// Rests that are remembered; beyond them one costs two compiles more when it comes again.
constexpr size_t kRests = 1 << 14;
constexpr uint64_t kOutsideTag = uint64_t{1} << 62;

using Edge = Structure::Edge;
using Results = std::set<std::pair<uint32_t, uint32_t>>;  // of nodes, by their positions

enum class Part : uint8_t { kDevice, kHostBefore, kHostAfter };

bool is_small(const Meta& meta, int64_t values) {
  return !meta.defined() || (at::isIntegralType(meta.dtype, true) && meta.numel() <= values);
}

// Whole numbers from whole numbers. What makes them from others, such as an argmax, has those at hand on the device.
bool is_small(const Graph& graph, size_t position, int64_t values) {
  const auto& node = *graph.nodes[position];
  const auto& metas = node.outs->metas;
  const auto edges = graph.edges_of(position);
  return !node.seeded && std::all_of(metas.begin(), metas.end(), [&](const Meta& m) { return is_small(m, values); }) &&
         std::all_of(edges.begin(), edges.end(), [&](const Edge& e) { return is_small(graph.meta(e), values); }) &&
         node.op->op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
}

// Per node which part it belongs to: `before` holds all that its nodes need, `after` all that need them.
std::vector<Part> find_parts(const Graph& graph, int64_t values) {
  const auto count = graph.nodes.size();
  std::vector<Part> parts(count, Part::kDevice);
  std::vector<bool> small(count);
  for (size_t i = 0; i < count; ++i) {
    const auto edges = graph.edges_of(i);
    small[i] = is_small(graph, i, values);
    const auto early = [&](const Edge& e) { return e.leaf || parts[e.from] == Part::kHostBefore; };
    if (small[i] && std::all_of(edges.begin(), edges.end(), early)) {
      parts[i] = Part::kHostBefore;
    }
  }
  std::vector<bool> needed_by_device(count, false);  // by the rest
  for (size_t i = count; i-- > 0;) {
    if (parts[i] == Part::kHostBefore) {
      continue;
    }
    if (small[i] && !needed_by_device[i]) {
      parts[i] = Part::kHostAfter;
      continue;
    }
    for (const auto& edge : graph.edges_of(i)) {
      if (!edge.leaf) {
        needed_by_device[edge.from] = true;
      }
    }
  }
  return parts;
}

// The same with as large parts as the host may compute; empty where there are none.
std::vector<Part> find_parts(const Graph& graph) {
  for (const auto most : kValues) {
    auto parts = find_parts(graph, most);
    HostCost cost;
    for (size_t i = 0; i < parts.size(); ++i) {
      if (parts[i] != Part::kDevice) {
        cost.add(*graph.nodes[i]);
      }
    }
    if (cost.operators == 0 || cost.operators == parts.size()) {
      return {};
    }
    if (cost.within(kHostPart)) {
      return parts;
    }
  }
  return {};
}

// What the rest gives to others: results of the graph, and what is needed afterwards.
Results device_results(const Graph& graph, const std::vector<Part>& parts) {
  Results results;
  const auto add = [&](const Edge& e) {
    if (!e.leaf && parts[e.from] == Part::kDevice) {
      results.emplace(e.from, e.index);
    }
  };
  std::for_each(graph.results.begin(), graph.results.end(), add);
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i] == Part::kHostAfter) {
      const auto edges = graph.edges_of(i);
      std::for_each(edges.begin(), edges.end(), add);
    }
  }
  return results;
}

// The results of the first host part that the device's part, or something outside of the graph, still needs: else a
// counter would be counted from the start again, in a graph that grows.
Results results_before(const Graph& graph, const std::vector<Part>& parts) {
  const auto count = parts.size();
  Results results;
  for (size_t i = 0; i < count; ++i) {
    const auto& node = graph.nodes[i];
    if (parts[i] == Part::kDevice) {
      for (const auto& edge : graph.edges_of(i)) {
        if (!edge.leaf && parts[edge.from] == Part::kHostBefore) {
          results.emplace(edge.from, edge.index);
        }
      }
    } else if (parts[i] == Part::kHostBefore && node.use_count() > node->cuts + graph.references[i]) {
      for (uint32_t index = 0; index < node->outs->metas.size(); ++index) {
        if (node->meta(index).defined()) {
          results.emplace(static_cast<uint32_t>(i), index);
        }
      }
    }
  }
  return results;
}

Vector<Value> as_values(const Graph& graph, const Results& results) {
  Vector<Value> values;
  for (const auto& [node, index] : results) {
    values.push_back({graph.nodes[node], index});
  }
  return values;
}

Hash device_key(const Graph& graph, const std::vector<Part>& parts, const Results& results) {
  Hash key;
  std::vector<uint32_t> position(parts.size());
  uint32_t count = 0;
  std::map<std::pair<bool, uint32_t>, uint64_t> outside;  // what the rest takes, by first use
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i] != Part::kDevice) {
      continue;
    }
    const auto& node = *graph.nodes[i];
    position[i] = count++;
    key.mix(node.op->hash);
    key.mix(argument_hash(node));
    key.mix(node.outs->value);
    for (const auto& edge : graph.edges_of(i)) {
      if (!edge.leaf && parts[edge.from] == Part::kDevice) {
        key.mix(static_cast<uint64_t>(position[edge.from]) << 16 | edge.index);
        continue;
      }
      const auto number = outside.emplace(std::pair(edge.leaf, edge.from), outside.size()).first->second;
      key.mix(kOutsideTag | number << 16 | edge.index);
      key.mix(graph.meta(edge).value);
    }
  }
  for (const auto& [node, index] : results) {
    key.mix(static_cast<uint64_t>(position[node]) << 16 | index);
  }
  key.mix(static_cast<uint64_t>(graph.device));
  return key;
}

// Of the parts all but numbers: those become inputs of a program once they vary, and no other graph is needed.
Hash host_key(const Graph& graph, const std::vector<Part>& parts) {
  Hash key;
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i] != Part::kDevice) {
      key.mix(graph.nodes[i]->op->hash);
      key.mix(graph.nodes[i]->outs->value);
    }
  }
  return key;
}

struct DevicePart {
  Hash parts;                // with which it was met first
  bool partitioned = false;  // it was met with others since
};

std::unordered_map<Hash, DevicePart, HashHasher>& device_parts() {
  static auto* const all = new std::unordered_map<Hash, DevicePart, HashHasher>();
  return *all;
}

}  // namespace

std::optional<HostPartition> partition_for_host(const Graph& graph, const Cut& what) {
  const RecorderLock lock;
  const auto parts = find_parts(graph);
  if (parts.empty()) {
    return {};
  }
  const auto results = device_results(graph, parts);
  auto& device_parts_seen = device_parts();
  if (device_parts_seen.size() >= kRests) {
    device_parts_seen.clear();
  }
  const auto host_parts = host_key(graph, parts);
  auto& device_part =
      device_parts_seen.emplace(device_key(graph, parts, results), DevicePart{host_parts}).first->second;
  if (!device_part.partitioned && device_part.parts == host_parts) {
    return {};
  }
  device_part.partitioned = true;
  if (what.scope == Cut::Scope::kLive) {
    call_trace_of(graph.device).read(graph.nodes.size());  // of which no single part tells
  }
  const auto scope = Cut::Scope::kNeeded;
  auto before = as_values(graph, results_before(graph, parts));
  return HostPartition{{graph.device, {}, std::move(before), scope, Cut::kNow, Cut::Donate::kNothing},
                       {graph.device, {}, as_values(graph, results), scope, Cut::kNow, what.donate}};
}

bool fits_host_partition(const Graph& graph) {
  const RecorderLock lock;
  bool fits = graph.nodes.size() <= kHostPart.operators;
  for (size_t i = 0; fits && i < graph.nodes.size(); ++i) {
    fits = is_small(graph, i, kValues[0]);
  }
  return fits;
}

void forget_host_partitions() {
  const RecorderLock lock;
  device_parts().clear();
}

}  // namespace torch_xla
