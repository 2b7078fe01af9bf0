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
  PyObject* buffer = nullptr;
  try {
    buffer = fill(leaf->meta(0).sizes, leaf->meta(0).dtype, number, device, leaf->frame, where);
  } catch (python_error& raised) {
    raised.restore();
    const py::error_already_set no_room;
    if (no_room.matches(py::module_::import("torch").attr("OutOfMemoryError"))) {
      const auto text = py::cast<std::string>(py::str(no_room.value()));
      const RecorderLock lock;
      leaf->source = c10::make_intrusive<Lost>(text + "\n  This tensor had no value before; make it again.");
    }
    throw no_room;
  }
  c10::intrusive_ptr<Source> old_source;  // destroyed after the lock is gone
  const RecorderLock lock;
  install_buffer(*leaf, buffer);
  if (leaf->source.get() == this) {  // no other thread did
    leaf->placement = where;
    old_source = std::move(leaf->source);
    leaf->source = {};
  }
}

void fetch_fills(const Vector<NodePtr>& leaves) {
  std::exception_ptr first;
  for (const auto& leaf : leaves) {
    if (leaf->is(Source::Kind::NumberFill)) {
      try {
        fetch_buffer(leaf);
      } catch (const py::error_already_set&) {
        if (!leaf->is(Source::Kind::Lost)) {
          throw;
        }
        first = first ? first : std::current_exception();
      }
    }
  }
  if (first) {
    std::rethrow_exception(first);
  }
}

void fetch_fills(c10::DeviceIndex device) {
  Vector<NodePtr> leaves;
  if (NumberFill::living.load(std::memory_order_relaxed) > 0) {
    const RecorderLock lock;
    for_each_storage(device, [&](Storage& s) {
      resolve(s.value);
      if (s.value.node->is(Source::Kind::NumberFill)) {
        leaves.push_back(s.value.node);
      }
    });
  }
  fetch_fills(leaves);
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
