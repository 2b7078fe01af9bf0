#include "tensor/lazy_clone.h"

#include <Python.h>

#include <algorithm>
#include <optional>

#include "base/python_hooks.h"
#include "tensor/placement.h"

namespace torch_xla {

namespace {

struct LazyClone final : Source {
  LazyClone(NodePtr o, const StoragePtr& h) : Source(Kind::Clone), original(std::move(o)) {
    if (h.defined()) {
      holder.emplace(h);
    }
  }
  void fetch(const NodePtr& leaf) override { fetch_clones({leaf}); }
  Location find(const Node& /*leaf*/) const override { return find_values(*original); }

  std::optional<c10::weak_intrusive_ptr<Storage>> holder;
  const NodePtr original;
};

template <class Visit>
void for_each_bufferless_clone(const Node& leaf, Visit visit) {
  if (leaf.clones == nullptr) {
    return;
  }
  for (const auto& weak : *leaf.clones) {
    const auto clone = weak.lock();
    if (clone.defined() && original_of(*clone) != nullptr) {
      visit(clone);
    }
  }
}

}  // namespace

const NodePtr* original_of(const Node& leaf) {
  return leaf.is(Source::Kind::Clone) ? &static_cast<const LazyClone&>(*leaf.source).original : nullptr;
}

bool is_cloneable(const Node& node) { return node.leaf() && !node.donated && node.has_value(); }

Value clone_leaf(const Value& leaf, const StoragePtr& holder) {
  if (leaf.node->is(Source::Kind::NumberFill) || find_values(*leaf.node).values != nullptr) {
    auto other = make_leaf({leaf.node->outs, leaf.index}, nullptr);  // from the host too
    const bool filled = leaf.node->is(Source::Kind::NumberFill) && holder.defined();
    other.node->placement = filled ? holder->placement : leaf.node->placement;
    other.node->source = leaf.node->source;
    return other;
  }
  const auto* const first = original_of(*leaf.node);
  // While a program is about to write over the original's buffer, the leaf is given one of its own.
  const auto original = first != nullptr && !(*first)->donated ? *first : leaf.node;
  auto clone = make_leaf({leaf.node->outs, leaf.index}, nullptr);
  clone.node->placement = leaf.node->placement;
  clone.node->source = c10::make_intrusive<LazyClone>(original, holder);
  if (original->clones == nullptr) {
    original->clones = std::make_unique<std::vector<c10::weak_intrusive_ptr<Node>>>();
  }
  auto& clones = *original->clones;
  if (clones.size() == clones.capacity()) {
    clones.erase(std::remove_if(clones.begin(), clones.end(), [](const auto& weak) { return weak.expired(); }),
                 clones.end());
  }
  clones.emplace_back(clone.node);
  return clone;
}

void merge_clone(Value& value) {
  auto& node = *value.node;
  if (original_of(node) == nullptr) {
    return;
  }
  const auto& clone = static_cast<const LazyClone&>(*node.source);
  if (clone.holder && clone.holder->expired()) {
    node.replacements = std::make_unique<c10::SmallVector<Value, 1>>(1, Value{clone.original, 0});
    node.source.reset();
    resolve(value);
  }
}

uint32_t bufferless_clones(const Node& leaf) {
  uint32_t count = 0;
  for_each_bufferless_clone(leaf, [&](const NodePtr&) { ++count; });
  return count;
}

Vector<NodePtr> clones_to_fetch(const Vector<NodePtr>& leaves, const Vector<bool>& donated) {
  Vector<NodePtr> bufferless;
  const RecorderLock lock;
  for (size_t i = 0; i < leaves.size(); ++i) {
    leaves[i]->donated = donated[i];
    if (original_of(*leaves[i]) != nullptr) {
      bufferless.push_back(leaves[i]);
    } else if (donated[i]) {
      for_each_bufferless_clone(*leaves[i], [&](const NodePtr& clone) { bufferless.push_back(clone); });
    }
  }
  std::sort(bufferless.begin(), bufferless.end());
  bufferless.erase(std::unique(bufferless.begin(), bufferless.end()), bufferless.end());
  return bufferless;
}

void fetch_clones(const Vector<NodePtr>& clones) {
  Vector<NodePtr> leaves;
  std::vector<c10::intrusive_ptr<Source>> old_sources;  // destroyed after the lock is gone
  std::vector<PyObject*> originals;
  for (const auto& leaf : clones) {
    const auto source = leaf->source;
    if (!leaf->is(Source::Kind::Clone)) {
      continue;
    }
    const auto& original = static_cast<const LazyClone&>(*source).original;
    fetch_buffer(original);
    old_sources.push_back(source);  // keeps the original
    leaves.push_back(leaf);
    originals.push_back(original->buffer);
  }
  if (leaves.empty()) {
    return;
  }
  const auto copies = copy(originals);
  const RecorderLock lock;
  for (size_t i = 0; i < leaves.size(); ++i) {
    install_buffer(*leaves[i], copies[i]);
    leaves[i]->source.reset();
  }
}

}  // namespace torch_xla
