#include "cut/reach.h"

#include <algorithm>
#include <iterator>

#include "tensor/lazy_clone.h"

namespace torch_xla {

namespace {

uint64_t epoch = 0;  // of the latest collection; under the recorder's lock

}  // namespace

uint64_t latest_epoch() { return epoch; }

uint64_t next_epoch() { return ++epoch; }

Vector<Node*> reach(Vector<Value>& roots) {
  Vector<Node*> reached;
  Vector<Node*> stack;
  const auto visit = [&](Value& value) {
    resolve(value);
    if (value.node->epoch != epoch) {
      merge_clone(value);
    }
    auto* const node = value.node.get();
    if (node->epoch != epoch) {
      node->epoch = epoch;
      node->references = 0;
      node->marked = false;
      if (!node->leaf()) {
        stack.push_back(node);
      }
    }
  };
  for (auto& root : roots) {
    visit(root);
  }
  while (!stack.empty()) {
    auto* const node = stack.back();
    stack.pop_back();
    reached.push_back(node);
    for (auto& input : node->inputs) {
      visit(input);
    }
  }
  return reached;
}

void sort_by_sequence(Vector<Node*>& nodes) {
  const auto earlier = [](const Node* a, const Node* b) { return a->sequence < b->sequence; };
  if (nodes.empty()) {
    return;
  }
  const auto [first, last] = std::minmax_element(nodes.begin(), nodes.end(), earlier);
  const auto start = (*first)->sequence;
  const auto span = (*last)->sequence - start + 1;
  if (span > 8 * nodes.size()) {
    std::sort(nodes.begin(), nodes.end(), earlier);
    return;
  }
  Vector<Node*> places(span, nullptr);
  for (auto* node : nodes) {
    places[node->sequence - start] = node;
  }
  std::copy_if(places.begin(), places.end(), nodes.begin(), [](const Node* n) { return n != nullptr; });
}

}  // namespace torch_xla
