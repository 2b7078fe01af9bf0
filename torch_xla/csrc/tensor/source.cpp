#include "tensor/source.h"

#include <Python.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <exception>

#include "base/python_hooks.h"
#include "tensor/lazy_clone.h"
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

std::atomic<int64_t> NumberFill::living{0};

void NumberFill::fetch(const NodePtr& leaf) {
  const auto where = leaf->placement == kUnspecified ? kReplicated : leaf->placement;
  auto* const buffer = fill(leaf->meta(0).sizes, leaf->meta(0).dtype, number, device, leaf->frame, where);
  c10::intrusive_ptr<Source> old_source;  // destroyed after the lock is gone
  const RecorderLock lock;
  install_buffer(*leaf, buffer);
  if (leaf->source.get() == this) {  // no other thread did
    leaf->placement = where;
    old_source = std::move(leaf->source);
    leaf->source = {};
  }
}

void fetch_fills(const Vector<NodePtr>& leaves, std::vector<size_t>& failed) {
  std::exception_ptr first;
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (leaves[i]->is(Source::Kind::NumberFill)) {
      try {
        fetch_buffer(leaves[i]);
      } catch (const python_error& error) {
        if (PyErr_GivenExceptionMatches(error.type, py::module_::import("torch").attr("OutOfMemoryError").ptr()) == 0) {
          failed.clear();
          throw;
        }
        failed.push_back(i);
        first = first ? first : std::current_exception();
      }
    }
  }
  if (first) {
    std::rethrow_exception(first);
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
