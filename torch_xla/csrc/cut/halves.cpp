// Parts of a graph that do not need each other, to be run by themselves where the whole failed.
#include <algorithm>
#include <iterator>
#include <map>
#include <unordered_map>

#include "cut/graph.h"

namespace torch_xla {

std::vector<Part> Graph::halves() const {
  // Per node one that it belongs together with, an earlier one or itself.
  std::unordered_map<const Node*, size_t> position;
  std::vector<size_t> leader(nodes.size());
  const auto find = [&](size_t i) {
    while (leader[i] != i) {
      leader[i] = leader[leader[i]];
      i = leader[i];
    }
    return i;
  };
  for (size_t i = 0; i < nodes.size(); ++i) {
    position[nodes[i].get()] = i;
    leader[i] = i;
    for (const auto& input : nodes[i]->inputs) {
      if (const auto found = position.find(input.node.get()); found != position.end()) {
        const auto [low, high] = std::minmax({find(found->second), find(i)});
        leader[high] = low;
      }
    }
  }
  std::map<size_t, Vector<Value>> components;
  for (const auto& output : outputs) {
    components[find(position.at(output.node.get()))].push_back(output);
  }
  if (components.size() < 2) {
    return {};
  }
  std::vector<Part> halves{{device, {}}, {device, {}}};
  size_t taken = 0;
  for (auto& [unused, values] : components) {
    auto& half = halves[taken++ < components.size() / 2 ? 0 : 1];
    std::move(values.begin(), values.end(), std::back_inserter(half.roots));
  }
  return halves;
}

}  // namespace torch_xla
