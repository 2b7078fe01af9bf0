#include "tensor/source.h"

#include <Python.h>
#include <torch/csrc/utils/pybind.h>

#include "base/python_hooks.h"
#include "tensor/storage.h"

namespace torch_xla {

void Pack::release() {
  release_object(std::exchange(buffer, nullptr));
  for (auto*& part : parts_) {
    release_object(std::exchange(part, nullptr));
  }
}

void Pack::fetch(const NodePtr& leaf) {
  if (layout->stacked) {  // of large ones, so that only what is wanted is taken out
    auto* const buffer_of_member = member(buffer, leaf->source_index);
    const RecorderLock lock;
    install_buffer(*leaf, buffer_of_member);
    return;
  }
  auto parts = parts_.empty() ? unpack(buffer, layout->shapes) : std::vector<PyObject*>();
  {
    const RecorderLock lock;
    if (parts_.empty()) {
      parts_.swap(parts);
    }
    if (leaf->buffer == nullptr) {
      leaf->buffer = std::exchange(parts_.at(leaf->source_index), nullptr);
    }
  }
  for (auto* const part : parts) {
    release_object(part);  // another thread was here first
  }
}

bool Pack::holds(const Vector<NodePtr>& all, const std::vector<uint32_t>& slots) const {
  if (slots.size() != layout->shapes.size()) {
    return false;
  }
  for (size_t i = 0; i < slots.size(); ++i) {
    const auto& leaf = *all[slots[i]];
    if (leaf.source.get() != this || leaf.source_index != i) {
      return false;
    }
  }
  return true;
}

void fetch_buffer(const NodePtr& leaf) {
  if (leaf->buffer == nullptr && leaf->source.defined()) {
    const auto source = leaf->source;
    source->fetch(leaf);
  }
}

Location locate(const NodePtr& leaf) {
  if (const auto* const original = original_of(*leaf)) {
    return locate(*original);
  }
  const auto location = find_values(*leaf);
  if (location.buffer != nullptr) {
    return location;
  }
  fetch_buffer(leaf);  // says why there is none
  return {leaf->buffer};
}

}  // namespace torch_xla
