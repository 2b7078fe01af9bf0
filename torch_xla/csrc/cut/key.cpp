// The structural key of a graph, what of it is no constant, and the order of its leaves and numbers: one pass finds
// all.
#include <algorithm>
#include <tuple>

#include "cut/adaptive.h"
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

// What turned out to be needed as a constant becomes one, as it is in calls recorded since.
void specialize_numbers(Node& node) {
  bool changed = false;
  for (size_t i = 0; i < node.args.size(); ++i) {
    if (node.args[i].kind == Arg::Kind::Adaptive && node.op->policy(i) == NumberPolicy::Constant) {
      node.args[i].kind = Arg::Kind::Attr;
      node.args[i].count = 0;
      changed = true;
    }
  }
  if (changed) {
    rehash_args(node);
  }
}

}  // namespace

// Numbers that may be constants, in the order of the graph's.
struct Graph::Adaptive {
  Vector<size_t> indices;  // which numbers they are
  Vector<bool> vary;       // those that were seen to
  Vector<bool> inputs;     // those that are inputs whether they vary or not
};

void Graph::add_numbers(const Node& node, Hash& constants, Adaptive& adaptive) {
  for (uint32_t i = 0; i < node.args.size(); ++i) {
    const auto& arg = node.args[i];
    if (!is_number(arg)) {
      continue;
    }
    const auto policy = node.op->policy(i);
    const bool tracked = arg.kind != Arg::Kind::Number ||
                         (policy == NumberPolicy::UntilVaries && static_cast<int>(i) != node.op->element);
    if (policy == NumberPolicy::Constant || (tracked && arg.value.isComplexDouble()) || must_be_constant(arg.value)) {
      hash_attr(constants, arg.value);
      continue;
    }
    const auto first = numbers.size();
    add_number(node, i);
    if (tracked) {
      const bool input =
          arg.kind == Arg::Kind::Integer && policy != NumberPolicy::UntilVaries && !is_special_number(arg.value);
      for (auto index = first; index < numbers.size(); ++index) {
        adaptive.indices.push_back(index);
        adaptive.vary.push_back(arg.count != 0);
        adaptive.inputs.push_back(input);
      }
    }
  }
}

void Graph::number_inputs(const Node& node, bool checks) {
  for (const auto& input : node.inputs) {
    auto& in = *input.node;
    ++in.references;
    if (!in.leaf()) {
      edges_.push_back({false, in.slot, input.index});
      topology.mix(static_cast<uint64_t>(in.slot) << 16 | input.index);
      continue;
    }
    if (checks) {
      check_value(in, device);
    }
    if (!in.output) {
      in.output = true;  // numbered
      in.slot = static_cast<uint32_t>(leaves.size());
      leaves.push_back(input.node);
      topology.mix(in.outs->value);
    }
    edges_.push_back({true, in.slot, input.index});
    topology.mix(kLeafTag | in.slot);
  }
}

void Graph::number_leaves(bool runs, bool checks) {
  Adaptive adaptive;
  Hash constants;
  edges_.clear();
  edges_.reserve(2 * nodes.size());
  first_edge_.reserve(nodes.size() + 1);
  first_edge_.assign(1, 0);
  results.clear();
  // Without their lengths, the end of one list could be read as the start of the next.
  topology.mix(static_cast<uint64_t>(nodes.size()) << 32 | outputs.size());
  for (auto& node : nodes) {
    if (node->numbered) {
      specialize_numbers(*node);
    }
    topology.mix(call_hash(*node));
    constants.mix(node->attrs);
    if (node->numbered) {
      add_numbers(*node, constants, adaptive);
    }
    if (node->seeded) {
      topology.mix(kSeedTag);
      for (const auto word : node->seed) {
        numbers.push_back({NumberSlot::Type::Seed, word, {}, node->slot, NumberSlot::kSeed, 0});
      }
    }
    number_inputs(*node, checks);
    first_edge_.push_back(static_cast<uint32_t>(edges_.size()));
  }
  donated.assign(leaves.size(), false);
  for (const auto& leaf : leaves) {
    leaf->output = false;
  }
  for (const auto& output : outputs) {
    topology.mix(static_cast<uint64_t>(output.node->slot) << 16 | output.index);
    results.push_back({false, output.node->slot, output.index});
    output.node->output = true;
  }
  topology.mix(static_cast<uint64_t>(device));
  key = topology;
  key.mix(constants);
  if (!adaptive.indices.empty()) {
    fold_constants(adaptive, runs);
  }
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
  Vector<uint32_t> first(nodes.size(), 0);  // output of each node
  for (size_t i = outputs.size(); i-- > 0;) {
    first[results[i].from] = static_cast<uint32_t>(i);
  }
  for_each_storage(device, [&](const Storage& s) {
    const auto& node = *s.value.node;
    if (node.epoch != epoch || node.leaf() || !node.output) {
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

void Graph::add_number(const Node& node, uint32_t position) {
  NumberSlot slot;
  slot.node = node.slot;
  slot.position = position;
  const auto add = [&](const c10::IValue& value) {
    slot.set(value);
    numbers.push_back(slot);
    ++slot.element;
  };
  const auto& value = node.args[position].value;
  if (value.isList()) {
    const auto list = value.toListRef();
    std::for_each(list.begin(), list.end(), add);
  } else {
    add(value);
  }
}

// Those that do not vary are constants, and no numbers.
void Graph::fold_constants(Adaptive& adaptive, bool runs) {
  auto& [indices, vary, inputs] = adaptive;
  Vector<uint64_t> where;
  Vector<uint64_t> values;
  where.reserve(indices.size());
  values.reserve(indices.size());
  for (const auto index : indices) {
    where.push_back(numbers[index].where());
    values.push_back(numbers[index].bits());
  }
  find_varying(key, where, values, vary, runs);
  Vector<bool> constant(numbers.size(), false);
  for (size_t i = 0; i < indices.size(); ++i) {
    vary[i] = vary[i] || inputs[i];
    constant[indices[i]] = !vary[i];
    key.mix(static_cast<uint64_t>(vary[i]));
    key.mix(vary[i] ? uint64_t{0} : values[i]);
  }
  size_t next = 0;
  const auto is_constant = [&](const NumberSlot&) { return constant[next++]; };
  numbers.erase(std::remove_if(numbers.begin(), numbers.end(), is_constant), numbers.end());
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
