// The structure of a graph: the order of its leaves, who reads what, and where results are to be.
#include <algorithm>
#include <tuple>

#include "cut/graph.h"
#include "cut/reach.h"
#include "device/device.h"
#include "ir/op_info.h"
#include "tensor/placeholder.h"

namespace torch_xla {

namespace {

constexpr uint64_t kLeafTag = uint64_t{1} << 63;
constexpr uint64_t kSeedTag = ~uint64_t{0};

// Operator and results of a call. Both hashes are good already, and this needs no chain of products.
Hash call_hash(const Node& node) {
  constexpr uint64_t kOuts = 0xff51afd7ed558ccdULL;
  const auto& [op, outs] = std::tie(node.op->hash, node.outs->value);
  Hash hash;
  hash.hi = op.hi + outs.hi * kOuts;
  hash.lo = op.lo + outs.lo * kOuts;
  return hash;
}

}  // namespace

void Graph::number_inputs(const Node& node) {
  for (const auto& input : node.inputs) {
    auto& in = *input.node;
    ++in.references;
    if (!in.leaf()) {
      edges_.push_back({false, in.slot, input.index});
      structure_.mix(static_cast<uint64_t>(in.slot) << 16 | input.index);
      continue;
    }
    check_value(in, device);
    if (!in.marked) {  // not numbered yet
      in.marked = true;
      in.slot = static_cast<uint32_t>(leaves.size());
      leaves.push_back(input.node);
      structure_.mix(in.outs->value);
    }
    edges_.push_back({true, in.slot, input.index});
    structure_.mix(kLeafTag | in.slot);
  }
}

// The structure: leaves in the order of their first use, and who reads what.
void Graph::connect() {
  edges_.reserve(2 * nodes.size());
  first_edge_.reserve(nodes.size() + 1);
  first_edge_.assign(1, 0);
  // Without their lengths, the end of one list could be read as the start of the next.
  structure_.mix(static_cast<uint64_t>(nodes.size()) << 32 | outputs.size());
  for (const auto& node : nodes) {
    structure_.mix(call_hash(*node));
    if (node->seeded) {
      structure_.mix(kSeedTag);
    }
    number_inputs(*node);
    first_edge_.push_back(static_cast<uint32_t>(edges_.size()));
  }
  donated.assign(leaves.size(), false);
  for (const auto& output : outputs) {
    structure_.mix(static_cast<uint64_t>(output.node->slot) << 16 | output.index);
    results.push_back({false, output.node->slot, output.index});
  }
  structure_.mix(static_cast<uint64_t>(device));
}

void Graph::hash_placements() {
  unplaced_key = key;
  Vector<uint32_t> at;
  for (const auto& leaf : leaves) {
    at.push_back(leaf->placement);
  }
  if (!spans_mesh() && std::all_of(at.begin(), at.end(), is_replicated)) {
    return;
  }
  key = with_placements(unplaced_key, at, output_placements);
  topology = with_placements(topology, at, output_placements);
}

void Graph::find_output_placements() {
  output_placements.assign(outputs.size(), kUnspecified);
  const auto epoch = latest_epoch();
  Vector<uint32_t> first(nodes.size(), static_cast<uint32_t>(outputs.size()));  // output of each node
  for (size_t i = outputs.size(); i-- > 0;) {
    first[results[i].from] = static_cast<uint32_t>(i);
  }
  for_each_storage(device, [&](const Storage& s) {
    const auto& node = *s.value.node;
    if (node.epoch != epoch || node.leaf()) {
      return;
    }
    for (size_t i = first[node.slot]; i < outputs.size() && outputs[i].node == s.value.node; ++i) {
      if (outputs[i] == s.value) {
        output_placements[i] = s.placement;
      }
    }
  });
}

Hash Structure::with_placements(Hash hash, const Vector<uint32_t>& at, const Vector<uint32_t>& to) {
  for (const auto* placements : {&at, &to}) {
    for (const auto placement : *placements) {
      hash.mix(static_cast<uint64_t>(is_replicated(placement) ? kReplicated : placement));
    }
  }
  return hash;
}

std::vector<Hash> Structure::roles() const {
  std::vector<Hash> roles;
  roles.reserve(nodes.size());
  for (const auto& node : nodes) {
    roles.push_back(node->op->hash);
  }
  std::vector<uint64_t> readers(nodes.size(), 0);
  for (size_t n = 0; n < nodes.size(); ++n) {
    const auto edges = edges_of(n);
    for (size_t i = 0; i < edges.size(); ++i) {
      roles[n].mix(static_cast<uint64_t>(edges[i].leaf));
      if (!edges[i].leaf) {
        readers[edges[i].from] += (nodes[n]->op->hash.lo | 1) * (i + 1);
      }
    }
  }
  for (size_t i = 0; i < roles.size(); ++i) {
    roles[i].mix(readers[i]);
  }
  return roles;
}

}  // namespace torch_xla
