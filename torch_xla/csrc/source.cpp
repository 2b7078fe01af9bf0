#include "source.h"

#include <Python.h>
#include <torch/csrc/utils/pybind.h>

#include "python_hooks.h"
#include "storage.h"

namespace torch_xla {

void Rest::let_go() { release_object(std::exchange(results, nullptr)); }

void Rest::fetch() {
  const py::sequence arrays = py::handle(results).attr("disassemble_into_single_device_arrays")();
  std::vector<PyObject*> buffers;
  for (const auto& shards : arrays) {
    buffers.push_back(py::object(py::reinterpret_borrow<py::sequence>(shards)[0]).release().ptr());
  }
  std::vector<c10::intrusive_ptr<Source>> done;  // one of them may be the last that keeps this
  const RecorderLock lock;  // operators on these leaves may be recorded meanwhile, which look where their values are
  size_t next = 0;
  for (const auto& [layout, members] : packs) {
    auto* const buffer = buffers.at(next++);
    c10::intrusive_ptr<Pack> pack;
    for (const auto& member : members) {
      if (const auto node = member.lock()) {
        if (!pack.defined()) {
          pack = c10::make_intrusive<Pack>(buffer, layout);
          pack->leaves = members;
        }
        done.push_back(std::exchange(node->source, pack));
      }
    }
    if (!pack.defined()) {
      release_object(buffer);
    }
  }
  for (const auto& leaf : leaves) {
    auto* const buffer = buffers.at(next++);
    if (const auto node = leaf.lock()) {
      node->buffer = buffer;
      done.push_back(std::move(node->source));
    } else {
      release_object(buffer);
    }
  }
}

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
  while (leaf->buffer == nullptr && leaf->source.defined()) {  // what was left of a run may be a pack
    const auto source = leaf->source;
    source->fetch();
  }
}

Location locate(const NodePtr& leaf) {
  while (leaf->buffer == nullptr && leaf->source.defined()) {
    const auto source = leaf->source;
    if (const auto* const original = source->original()) {
      return locate(*original);
    }
    if (const auto* pack = source->pack()) {
      return {pack->buffer, pack->start_of(*leaf)};
    }
    source->fetch();
  }
  return {leaf->buffer, -1};
}

}  // namespace torch_xla
