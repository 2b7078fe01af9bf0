// What of the numbers in a graph is a constant of its program and what an input: torch.compile's automatic dynamic
// shapes, for numbers. Those that XLA compiles better as constants, such as the start of a slice, are constants until a
// graph comes that differs from an earlier one in nothing else, and inputs from then on.
#include <algorithm>
#include <tuple>
#include <unordered_map>

#include "cut/graph.h"
#include "ir/op_info.h"

namespace torch_xla {

namespace {

// Graphs, and constants of 8 bytes each, that are remembered; beyond them a graph costs a compile more when it comes
// again.
constexpr size_t kGraphs = 1 << 14;
constexpr size_t kConstants = size_t{1} << 22;
constexpr uint64_t kNumberTag = uint64_t{1} << 62;

// Whether an argument was recorded as a constant that its operator may be given as a number, if the policy says so.
bool is_constant_number(const Node& node, size_t position) {
  const auto& arg = node.args[position];
  return arg.kind == Arg::Kind::Attr && is_numeric(arg.value) && node.op->redefinitions == 0;
}

// What an argument is by what is known of its operator now, which may be more than when it was recorded.
Arg::Kind kind_now(const Node& node, size_t position) {
  const auto kind = node.args[position].kind;
  const auto policy = node.op->policy(position);
  if (kind == Arg::Kind::Adaptive && policy == NumberPolicy::Constant) {
    return Arg::Kind::Attr;
  }
  return policy == NumberPolicy::SpecializedTracked && is_constant_number(node, position) ? Arg::Kind::Adaptive : kind;
}

bool tells_more_now(const Node& node) {
  if (!node.op->learned) {
    return false;
  }
  for (size_t i = 0; i < node.args.size(); ++i) {
    if (kind_now(node, i) != node.args[i].kind) {
      return true;
    }
  }
  return false;
}

// The numbers of graphs that are alike in all else.
struct History {
  Vector<uint64_t> positions;
  Vector<uint64_t> first;
  Vector<bool> vary;  // those that had another value since

  // Carried over to other positions, after policies changed to or from constants.
  History moved(const Vector<uint64_t>& to, const Vector<uint64_t>& values) const {
    History history{to, values, Vector<bool>(to.size(), false)};
    for (size_t i = 0, k = 0; i < to.size(); ++i) {
      while (k < positions.size() && positions[k] < to[i]) {
        ++k;
      }
      if (k < positions.size() && positions[k] == to[i]) {
        history.first[i] = first[k];
        history.vary[i] = vary[k];
      }
    }
    return history;
  }
};

struct ProgramConstants {
  Hash key;
  size_t inputs;  // among its numbers
  Vector<uint64_t> constants;
};

struct Memory {
  std::unordered_map<Hash, History, HashHasher> histories;          // by the key without the numbers
  std::unordered_map<Hash, ProgramConstants, HashHasher> programs;  // the first of each kind, by what else it is
  size_t constants = 0;                                             // of all `programs`
};

Memory& memory() {
  static auto* const all = new Memory();
  return *all;
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
    const auto& node = *graph.nodes[n];
    rest.mix(begin_attrs(*node.op, node.settings));
    for (uint32_t i = 0; i < node.args.size(); ++i) {
      const auto& arg = node.args[i];
      const bool number = kind_now(node, i) >= Arg::Kind::Number;
      if (number && must_be_constant(arg.value)) {
        hash_arg(rest, attr(arg.value));
        continue;
      }
      if (arg.kind == Arg::Kind::Number && node.op->policy(i) == NumberPolicy::Input) {
        hash_arg(rest, arg);
        continue;
      }
      const bool unknown = node.op->policy(i) == NumberPolicy::Specialized && is_constant_number(node, i);
      if (!(number || unknown) || arg.value.isComplexDouble()) {
        hash_arg(rest, is_number(arg) ? attr(arg.value) : arg);
        continue;
      }
      rest.mix(kNumberTag);
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

}  // namespace

Hash argument_hash(const Node& node) {
  if (!tells_more_now(node)) {
    return node.attrs;
  }
  auto attrs = begin_attrs(*node.op, node.settings);
  for (size_t i = 0; i < node.args.size(); ++i) {
    auto arg = node.args[i];
    arg.kind = kind_now(node, i);
    hash_arg(attrs, arg);
  }
  return attrs;
}

void Graph::add_numbers(uint32_t n, Hash& constants) {
  const auto& node = *nodes[n];
  for (uint32_t i = 0; i < node.args.size(); ++i) {
    const auto& arg = node.args[i];
    const auto kind = kind_now(node, i);
    if (kind < Arg::Kind::Number) {
      continue;
    }
    const auto policy = node.op->policy(i);
    const bool tracked = kind != Arg::Kind::Number ||
                         (policy == NumberPolicy::SpecializedTracked && static_cast<int>(i) != node.op->element);
    if (policy == NumberPolicy::Constant || (tracked && arg.value.isComplexDouble()) || must_be_constant(arg.value)) {
      hash_attr(constants, arg.value);
      continue;
    }
    const auto first = numbers.size();
    add_number(n, i);
    if (tracked) {
      const bool varies = std::binary_search(varied_.begin(), varied_.end(), std::pair(n, i));
      const bool input =
          kind == Arg::Kind::Integer && policy != NumberPolicy::SpecializedTracked && !is_special_number(arg.value);
      for (auto index = first; index < numbers.size(); ++index) {
        adaptive_.indices.push_back(index);
        adaptive_.positions.push_back(numbers[index].where());
        adaptive_.values.push_back(numbers[index].bits());
        adaptive_.vary.push_back(varies);
        adaptive_.inputs.push_back(input);
      }
    }
  }
}

void Graph::add_number(uint32_t node, uint32_t position) {
  NumberSlot slot;
  slot.node = node;
  slot.position = position;
  const auto add = [&](const c10::IValue& value) {
    slot.set(value);
    numbers.push_back(slot);
    ++slot.element;
  };
  const auto& value = nodes[node]->args[position].value;
  if (value.isList()) {
    const auto list = value.toListRef();
    std::for_each(list.begin(), list.end(), add);
  } else {
    add(value);
  }
}

// Those that do not vary are constants, and no numbers.
void Graph::fold_constants() {
  auto& [rest, indices, positions, values, vary, inputs] = adaptive_;
  rest = key;
  if (const auto known = memory().histories.find(rest); known != memory().histories.end()) {
    const auto earlier = known->second.moved(positions, values);
    for (size_t i = 0; i < values.size(); ++i) {
      vary[i] = vary[i] || earlier.vary[i] || (purpose_ != Cut::Purpose::kShow && values[i] != earlier.first[i]);
    }
  }
  Vector<bool> constant(numbers.size(), false);
  for (size_t i = 0; i < indices.size(); ++i) {
    const bool input = vary[i] || inputs[i];
    constant[indices[i]] = !input;
    key.mix(static_cast<uint64_t>(input));
    key.mix(input ? uint64_t{0} : values[i]);
  }
  size_t next = 0;
  const auto is_constant = [&](const NumberSlot&) { return constant[next++]; };
  numbers.erase(std::remove_if(numbers.begin(), numbers.end(), is_constant), numbers.end());
}

void Graph::remember_numbers() const {
  auto& histories = memory().histories;
  const auto& [rest, indices, positions, values, vary, inputs] = adaptive_;
  if (positions.empty()) {
    return;
  }
  if (histories.size() >= kGraphs && histories.count(rest) == 0) {
    histories.clear();
  }
  auto& history = histories[rest];
  history = history.moved(positions, values);
  history.vary = vary;
}

void Graph::bind() {
  const RecorderLock lock;
  find_numbers();
  if (begun_) {
    remember_numbers();
  }
}

void Graph::find_numbers() {
  Hash constants;
  numbers.clear();
  stacks.clear();
  scalar_layout_ = nullptr;
  equal_key = Hash();
  adaptive_ = {};
  for (uint32_t n = 0; n < nodes.size(); ++n) {
    const auto& node = *nodes[n];
    constants.mix(argument_hash(node));
    if (node.numbered || node.op->learned) {
      add_numbers(n, constants);
    }
    if (node.seeded) {
      for (const auto word : node.seed) {
        numbers.push_back({NumberSlot::Type::Seed, word, {}, n, NumberSlot::kSeed, 0});
      }
    }
  }
  topology = key = structure_;
  key.mix(constants);
  if (!adaptive_.indices.empty()) {
    fold_constants();
  }
  hash_donations();
  hash_placements();
}

bool Graph::constants_vary() {
  const RecorderLock lock;
  Constants constants;
  const auto rest = hash_without_constants(*this, constants);
  if (memory().constants > kConstants) {
    memory().programs.clear();
    memory().constants = 0;
  }
  const auto [it, fresh] = memory().programs.emplace(rest, ProgramConstants{key, numbers.size(), constants.bits});
  if (fresh) {
    memory().constants += constants.bits.size();
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
    auto& op = *nodes[at.node]->op;
    if (constants.bits[k] == first.constants[k] || is_input || op.policy(at.position) == NumberPolicy::Constant) {
      continue;
    }
    any = true;
    op.note_variation(at.position);
    varied_.emplace_back(at.node, at.position);
  }
  if (any) {
    std::sort(varied_.begin(), varied_.end());
    find_numbers();
  }
  return any;
}

void forget_numbers() {
  const RecorderLock lock;
  memory() = {};
}

}  // namespace torch_xla
