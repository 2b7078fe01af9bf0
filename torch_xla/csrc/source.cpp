#include "source.h"

#include <Python.h>
#include <torch/csrc/utils/pybind.h>

#include "python_hooks.h"

namespace torch_xla {

void Rest::let_go() { release_object(std::exchange(results, nullptr)); }

void Rest::fetch() {
  const py::sequence arrays = py::handle(results).attr("disassemble_into_single_device_arrays")();
  std::vector<c10::intrusive_ptr<Source>> done;  // one of them may be the last that keeps this
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (const auto node = leaves[i].lock()) {
      node->buffer = py::object(py::reinterpret_borrow<py::sequence>(arrays[i])[0]).release().ptr();
      done.push_back(std::move(node->source));
    }
  }
}

void Pack::let_go() { release_object(std::exchange(buffer, nullptr)); }

void Pack::fetch() {
  const auto parts = unpack(buffer, layout->shapes);
  for (size_t i = 0; i < leaves.size(); ++i) {
    const auto node = leaves[i].lock();
    if (node.defined() && node->buffer == nullptr) {
      node->buffer = parts[i];
    } else {
      Py_DECREF(parts[i]);
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
  if (leaf->buffer == nullptr && leaf->source.defined()) {
    if (const auto* pack = leaf->source->pack()) {
      return {pack->buffer, pack->start_of(*leaf)};
    }
    fetch_buffer(leaf);
  }
  return {leaf->buffer, -1};
}

}  // namespace torch_xla
