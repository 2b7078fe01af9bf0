#include "cut/host_partition.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <unordered_map>
#include <vector>

#include "ir/op_info.h"
#include "loops/call_trace.h"

namespace torch_xla {

namespace {

// Of one result; of all results together; operators, of which the host computes some 50,000 a second.
constexpr std::array<int64_t, 3> kValues = {4096, 512, 64};
constexpr int64_t kValuesTogether = 32768;
constexpr size_t kOperators = 256;
// Rests that are remembered; beyond them one costs two compiles more when it comes again.
constexpr size_t kRests = 1 << 14;
constexpr uint64_t kOutsideTag = uint64_t{1} << 62;

enum class Part : uint8_t { kDevice, kHostBefore, kHostAfter };

bool is_small(const Meta& meta, int64_t values) {
  return !meta.defined() || (at::isIntegralType(meta.dtype, true) && meta.numel() <= values);
}

// Whole numbers from whole numbers. What makes them from others, such as an argmax, has those at hand on the device.
bool is_small(const Node& node, int64_t values) {
  const auto& metas = node.outs->metas;
  return !node.seeded && std::all_of(metas.begin(), metas.end(), [&](const Meta& m) { return is_small(m, values); }) &&
         std::all_of(node.inputs.begin(), node.inputs.end(),
                     [&](const Value& v) { return is_small(v.node->meta(v.index), values); }) &&
         node.op->op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
}

int64_t values_of(const Node& node) {
  int64_t values = 0;
  for (const auto& meta : node.outs->metas) {
    values += meta.defined() ? meta.numel() : 0;
  }
  return values;
}

// Per node which part it belongs to: `before` holds all that its nodes need, `after` all that need them.
std::vector<Part> find_parts(const Graph& graph, int64_t values) {
  const auto count = graph.nodes.size();
  std::vector<Part> parts(count, Part::kDevice);
  std::vector<bool> small(count);
  for (size_t i = 0; i < count; ++i) {
    const auto& inputs = graph.nodes[i]->inputs;
    small[i] = is_small(*graph.nodes[i], values);
    const auto early = [&](const Value& v) { return v.node->leaf() || parts[v.node->slot] == Part::kHostBefore; };
    if (small[i] && std::all_of(inputs.begin(), inputs.end(), early)) {
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
    for (const auto& input : graph.nodes[i]->inputs) {
      if (!input.node->leaf()) {
        needed_by_device[input.node->slot] = true;
      }
    }
  }
  return parts;
}

// The same with as large parts as the host may compute; empty where there are none.
std::vector<Part> find_parts(const Graph& graph) {
  for (const auto most : kValues) {
    auto parts = find_parts(graph, most);
    size_t operators = 0;
    int64_t values = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      if (parts[i] != Part::kDevice) {
        ++operators;
        values += values_of(*graph.nodes[i]);
      }
    }
    if (operators == 0 || operators == parts.size()) {
      return {};
    }
    if (operators <= kOperators && values <= kValuesTogether) {
      return parts;
    }
  }
  return {};
}

// What the rest gives to others: results of the graph, and what is needed afterwards.
Vector<Value> device_results(const Graph& graph, const std::vector<Part>& parts) {
  Vector<Value> results;
  const auto add = [&](const Value& v) {
    if (!v.node->leaf() && parts[v.node->slot] == Part::kDevice) {
      results.push_back(v);
    }
  };
  std::for_each(graph.outputs.begin(), graph.outputs.end(), add);
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i] == Part::kHostAfter) {
      std::for_each(graph.nodes[i]->inputs.begin(), graph.nodes[i]->inputs.end(), add);
    }
  }
  std::sort(results.begin(), results.end(), [](const Value& a, const Value& b) {
    return a.node->slot != b.node->slot ? a.node->slot < b.node->slot : a.index < b.index;
  });
  results.erase(std::unique(results.begin(), results.end()), results.end());
  return results;
}

// The results of the first host part that the device's part, or something outside of the graph, still needs: else a
// counter would be counted from the start again, in a graph that grows.
Vector<Value> results_before(const Graph& graph, const std::vector<Part>& parts) {
  const auto count = parts.size();
  std::vector<size_t> references(count, 1);
  for (const auto& output : graph.outputs) {
    ++references[output.node->slot];
  }
  Vector<Value> results;
  for (size_t i = 0; i < count; ++i) {
    const auto& node = graph.nodes[i];
    if (parts[i] == Part::kDevice) {
      std::copy_if(node->inputs.begin(), node->inputs.end(), std::back_inserter(results),
                   [&](const Value& v) { return !v.node->leaf() && parts[v.node->slot] == Part::kHostBefore; });
    } else if (parts[i] == Part::kHostBefore && node.use_count() > references[i] + node->references) {
      for (uint32_t index = 0; index < node->outs->metas.size(); ++index) {
        if (node->meta(index).defined()) {
          results.push_back({node, index});
        }
      }
    }
  }
  return results;
}

Hash device_key(const Graph& graph, const std::vector<Part>& parts, const Vector<Value>& results) {
  Hash key;
  std::vector<uint32_t> position(parts.size());
  uint32_t count = 0;
  std::unordered_map<const Node*, uint64_t> outside;  // what the rest takes, by first use
  for (size_t i = 0; i < parts.size(); ++i) {
    if (parts[i] != Part::kDevice) {
      continue;
    }
    const auto& node = *graph.nodes[i];
    position[i] = count++;
    key.mix(node.op->hash);
    key.mix(node.attrs);
    key.mix(node.outs->value);
    for (const auto& [in, index] : node.inputs) {
      if (!in->leaf() && parts[in->slot] == Part::kDevice) {
        key.mix(static_cast<uint64_t>(position[in->slot]) << 16 | index);
        continue;
      }
      const auto number = outside.emplace(in.get(), outside.size()).first->second;
      const auto& meta = in->meta(index);
      key.mix(kOutsideTag | number << 16 | index);
      key.mix(meta.value);
    }
  }
  for (const auto& [node, index] : results) {
    key.mix(static_cast<uint64_t>(position[node->slot]) << 16 | index);
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
  auto results = device_results(graph, parts);
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
  return HostPartition{{graph.device, {}, results_before(graph, parts), scope, Cut::kNow, Cut::Donate::kNothing},
                       {graph.device, {}, std::move(results), scope, Cut::kNow, what.donate}};
}

bool fits_host_partition(const Graph& graph) {
  const RecorderLock lock;
  return graph.nodes.size() <= kOperators &&
         std::all_of(graph.nodes.begin(), graph.nodes.end(), [](const NodePtr& n) { return is_small(*n, kValues[0]); });
}

void forget_host_partitions() {
  const RecorderLock lock;
  device_parts().clear();
}

}  // namespace torch_xla
