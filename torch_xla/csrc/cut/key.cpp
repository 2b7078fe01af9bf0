// The structural key of a graph, and the order of its leaves and numbers, which are found in the same pass.
#include <algorithm>
#include <tuple>

#include "cut/adaptive.h"
#include "cut/graph.h"
#include "ir/op_info.h"

namespace torch_xla {

namespace {

constexpr uint64_t kLeafTag = uint64_t{1} << 63;

// Operator, constants and results of a call. The three hashes are good already, and this needs no chain of products.
Hash call_hash(const Node& node) {
  constexpr uint64_t kAttrs = 0x9fb21c651e98df25ULL;
  constexpr uint64_t kOuts = 0xff51afd7ed558ccdULL;
  const auto& [op, attrs, outs] = std::tie(node.op->hash, node.attrs, node.outs->value);
  Hash hash;
  hash.hi = op.hi + attrs.hi * kAttrs + outs.hi * kOuts;
  hash.lo = op.lo + attrs.lo * kAttrs + outs.lo * kOuts;
  return hash;
}

}  // namespace

void Graph::number_leaves(bool runs) {
  Vector<size_t> adaptive;  // which numbers are
  Vector<bool> vary;        // those that are no constants in any program
  // Without their lengths, the end of one list could be read as the start of the next.
  key.mix(static_cast<uint64_t>(nodes.size()) << 32 | outputs.size());
  for (auto& node : nodes) {
    key.mix(call_hash(*node));
    const bool constant = node->numbered && node->op->static_numbers.load(std::memory_order_relaxed);
    for (size_t i = 0; node->numbered && i < node->args.size(); ++i) {
      const auto& arg = node->args[i];
      if (!is_number(arg)) {
        continue;
      }
      if (constant) {
        hash_attr(key, arg.value);
        continue;
      }
      if (arg.kind != Arg::Kind::Number) {
        adaptive.push_back(numbers.size());
        vary.push_back(arg.kind == Arg::Kind::Integer && !is_special_number(arg.value));
      }
      NumberSlot slot;
      slot.node = node->slot;
      slot.position = static_cast<uint32_t>(i);
      if (arg.value.isInt()) {
        slot.type = NumberSlot::Type::Int;
        slot.integer = arg.value.toInt();
      } else if (arg.value.isDouble()) {
        slot.type = NumberSlot::Type::Float;
        slot.number = arg.value.toDouble();
      } else {
        slot.type = NumberSlot::Type::Complex;
        slot.number = arg.value.toComplexDouble();
      }
      numbers.push_back(slot);
    }
    if (node->seeded) {
      for (const auto word : node->seed) {
        numbers.push_back({NumberSlot::Type::Int, word, {}, node->slot, NumberSlot::kSeed});
      }
    }
    for (const auto& input : node->inputs) {
      auto& in = *input.node;
      ++in.references;
      if (!in.leaf()) {
        key.mix(static_cast<uint64_t>(in.slot) << 16 | input.index);
        continue;
      }
      TORCH_CHECK(in.error == nullptr, in.error ? *in.error : std::string());
      if (!in.output) {
        in.output = true;  // numbered
        in.slot = static_cast<uint32_t>(leaves.size());
        leaves.push_back(input.node);
        key.mix(in.outs->value);
      }
      key.mix(kLeafTag | static_cast<uint64_t>(in.placement) << 32 | in.slot);
    }
  }
  donated.assign(leaves.size(), false);
  for (const auto& leaf : leaves) {
    leaf->output = false;
  }
  for (const auto& output : outputs) {
    key.mix(static_cast<uint64_t>(output.node->slot) << 16 | output.index);
    output.node->output = true;
  }
  key.mix(static_cast<uint64_t>(device));
  if (!adaptive.empty()) {
    settle_adaptive(adaptive, std::move(vary), runs);
  }
}

// Those that do not vary are constants, and no numbers.
void Graph::settle_adaptive(const Vector<size_t>& places, Vector<bool> vary, bool runs) {
  Vector<uint64_t> values;
  values.reserve(places.size());
  for (const auto place : places) {
    values.push_back(numbers[place].bits());
  }
  find_varying(key, values, vary, runs);
  Vector<bool> constant(numbers.size(), false);
  for (size_t i = 0; i < places.size(); ++i) {
    constant[places[i]] = !vary[i];
    key.mix(static_cast<uint64_t>(vary[i]));
    key.mix(vary[i] ? uint64_t{0} : values[i]);
  }
  size_t next = 0;
  const auto is_constant = [&](const NumberSlot&) { return constant[next++]; };
  numbers.erase(std::remove_if(numbers.begin(), numbers.end(), is_constant), numbers.end());
}

std::vector<Hash> Graph::roles() const {
  std::vector<Hash> roles;
  roles.reserve(nodes.size());
  for (const auto& node : nodes) {
    auto& role = roles.emplace_back(node->op->hash);
    for (size_t i = 0; i < node->inputs.size(); ++i) {
      role.mix(static_cast<uint64_t>(node->inputs[i].node->leaf()));
    }
  }
  std::vector<uint64_t> readers(nodes.size(), 0);
  for (const auto& node : nodes) {
    for (size_t i = 0; i < node->inputs.size(); ++i) {
      const auto& input = *node->inputs[i].node;
      if (!input.leaf()) {
        readers.at(input.slot) += (node->op->hash.lo | 1) * (i + 1);
      }
    }
  }
  for (size_t i = 0; i < roles.size(); ++i) {
    roles[i].mix(readers[i]);
  }
  return roles;
}

}  // namespace torch_xla
