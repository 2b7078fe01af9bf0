// Constants that turn out to vary: graphs that are to be compiled are compared with earlier ones that are alike in all
// but numbers. While nothing is compiled, nothing is compared.
#include <tuple>
#include <unordered_map>

#include "cut/adaptive.h"
#include "cut/graph.h"
#include "ir/op_info.h"

namespace torch_xla {

namespace {

// How many constants are remembered, 8 bytes each; beyond them a graph costs a compile more when it comes again.
constexpr size_t kConstants = size_t{1} << 22;
constexpr uint64_t kConstantTag = uint64_t{1} << 62;

struct FirstGraph {
  Hash key;
  size_t inputs;  // among its numbers
  Vector<uint64_t> constants;
};

struct ComparedGraphs {
  std::unordered_map<Hash, FirstGraph, HashHasher> graphs;  // the first of each kind, by what else the graph is
  size_t count = 0;                                         // of their constants
};

ComparedGraphs& compared_graphs() {
  static auto* const graphs = new ComparedGraphs();
  return *graphs;
}

// Whether an argument is a constant of which it is not known whether it varies.
bool may_vary(const Node& node, size_t position) {
  const auto& arg = node.args[position];
  const auto policy = node.op->policy(position);
  return arg.kind == Arg::Kind::Attr && is_numeric(arg.value) && node.op->redefinitions == 0 &&
         (policy == NumberPolicy::UntilSeenToVary || policy == NumberPolicy::UntilVaries);
}

// A constant of a graph: an argument of a node, or an element of one.
struct Position {
  uint32_t node;
  uint32_t position;
  uint32_t element;
};

struct Constants {
  Vector<uint64_t> bits;
  Vector<Position> positions;

  void add(Position at, const c10::IValue& value) {
    NumberSlot slot;
    slot.set(value);
    bits.push_back(slot.bits());
    positions.push_back(at);
  }
};

// The hash of a graph without its form and without the constants that may vary.
Hash hash_without_constants(const Graph& graph, Constants& constants) {
  auto rest = graph.topology;
  for (uint32_t n = 0; n < graph.nodes.size(); ++n) {
    const auto& node = graph.nodes[n];
    rest.mix(begin_attrs(*node->op, node->settings));
    for (uint32_t i = 0; i < node->args.size(); ++i) {
      const auto& arg = node->args[i];
      if (is_number(arg) && must_be_constant(arg.value)) {
        hash_arg(rest, attr(arg.value));
        continue;
      }
      if (arg.kind == Arg::Kind::Number && node->op->policy(i) == NumberPolicy::Input) {
        hash_arg(rest, arg);
        continue;
      }
      if (!(is_number(arg) || may_vary(*node, i)) || arg.value.isComplexDouble()) {
        hash_arg(rest, is_number(arg) ? attr(arg.value) : arg);
        continue;
      }
      // An operator of which more is known is recorded in another way than before; what is an input is another graph.
      rest.mix(kConstantTag);
      hash_arg(rest, {Arg::Kind::Adaptive, 0, arg.value});
      if (arg.value.isList()) {
        uint32_t element = 0;
        for (const auto& value : arg.value.toListRef()) {
          constants.add({n, i, element++}, value);
        }
      } else {
        constants.add({n, i, 0}, arg.value);
      }
    }
  }
  return rest;
}

// Has the next cut find a number where there was a constant.
void make_adaptive(Node& node, size_t position) {
  node.args[position].kind = Arg::Kind::Adaptive;
  rehash_args(node);
}

}  // namespace

bool Graph::constants_vary() {
  const RecorderLock lock;
  Constants constants;
  const auto rest = hash_without_constants(*this, constants);
  auto& compared = compared_graphs();
  if (compared.count > kConstants) {
    compared = {};
  }
  const auto [it, fresh] = compared.graphs.emplace(rest, FirstGraph{key, numbers.size(), constants.bits});
  if (fresh) {
    compared.count += constants.bits.size();
    return false;
  }
  const auto& first = it->second;
  if (first.constants == constants.bits && first.inputs == numbers.size()) {
    equal_key = first.key;
    return false;
  }
  bool any = false;
  auto input = numbers.begin();
  for (size_t k = 0; k < constants.bits.size(); ++k) {
    const auto& at = constants.positions[k];
    const auto before = [&](const NumberSlot& n) {
      return std::tie(n.node, n.position, n.element) < std::tie(at.node, at.position, at.element);
    };
    while (input != numbers.end() && before(*input)) {
      ++input;
    }
    const bool is_input = input != numbers.end() && input->node == at.node && input->position == at.position &&
                          input->element == at.element;
    if (constants.bits[k] == first.constants[k] || is_input) {
      continue;
    }
    auto& node = *nodes[at.node];
    auto& op = *node.op;
    if (op.policy(at.position) == NumberPolicy::Constant) {
      continue;
    }
    any = true;
    op.note_variation(at.position);
    for (const auto& other : nodes) {
      if (other->op == &op && may_vary(*other, at.position)) {
        make_adaptive(*other, at.position);
      }
    }
    node.args[at.position].count = 1;
  }
  return any;
}

void forget_constants() {
  const RecorderLock lock;
  compared_graphs() = {};
}

}  // namespace torch_xla
