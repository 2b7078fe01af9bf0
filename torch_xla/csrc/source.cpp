#include "source.h"

#include <Python.h>
#include <torch/csrc/utils/pybind.h>

#include "python_hooks.h"
#include "storage.h"

namespace torch_xla {

void Pack::let_go() { release_object(std::exchange(buffer, nullptr)); }

void Pack::fetch() {
  const auto parts = unpack(buffer, layout->shapes);
  const RecorderLock lock;
  for (size_t i = 0; i < leaves.size(); ++i) {
    const auto node = leaves[i].lock();
    if (node.defined() && node->buffer == nullptr) {
      node->buffer = parts[i];
    } else {
      release_object(parts[i]);
    }
  }
}

bool Pack::holds(const std::vector<NodePtr>& all, const std::vector<uint32_t>& slots) const {
  if (slots.size() != leaves.size()) {
    return false;
  }
  for (size_t i = 0; i < slots.size(); ++i) {
    if (leaves[i]._unsafe_get_target() != all[slots[i]].get()) {
      return false;
    }
  }
  return true;
}

int64_t Pack::start_of(const Node& leaf) const {
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (leaves[i]._unsafe_get_target() == &leaf) {
      return layout->starts[i];
    }
  }
  TORCH_CHECK(false, "[run] a value is not in the pack that it names");
}

void fetch_buffer(const NodePtr& leaf) {
  if (leaf->buffer == nullptr && leaf->source.defined()) {
    const auto source = leaf->source;
    source->fetch();
  }
}

Location locate(const NodePtr& leaf) {
  if (leaf->buffer != nullptr || !leaf->source.defined()) {
    return {leaf->buffer, -1};
  }
  if (const auto* const original = leaf->source->original()) {
    return locate(*original);
  }
  if (const auto* const pack = leaf->source->pack()) {
    return {pack->buffer, pack->start_of(*leaf)};
  }
  fetch_buffer(leaf);  // says why there is none
  return {leaf->buffer, -1};
}

}  // namespace torch_xla
