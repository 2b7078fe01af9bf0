// Where the values of a leaf are, if it has no buffer of its own yet.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "ir/node.h"

namespace torch_xla {

// Several results that the program gave as one buffer. Its leaves keep it, also once they have buffers of their own:
// the next step takes the pack as it is. It does not know them; hundreds come and go with each step.
struct Pack final : Source {
  struct Layout {
    std::vector<std::vector<int64_t>> shapes;  // of the members
    std::vector<int64_t> starts;               // their first elements
    bool stacked = false;                      // the buffer is an array of members of one shape
  };
  Pack(PyObject* stolen_buffer, std::shared_ptr<const Layout> l)
      : Source(Kind::Pack), buffer(stolen_buffer), layout(std::move(l)) {}
  ~Pack() override { release(); }
  void release_resources() override { release(); }
  void release();
  void fetch(const NodePtr& leaf) override;
  Location find(const Node& leaf) const override { return {buffer, layout->starts.at(leaf.source_index)}; }
  // Whether these leaves, in this order, are all it holds.
  bool holds(const Vector<NodePtr>& all, const std::vector<uint32_t>& slots) const;

  PyObject* buffer;  // the members end to end, of one dimension where it is no stack
  const std::shared_ptr<const Layout> layout;

 private:
  std::vector<PyObject*> parts_;  // once one was wanted: those that no leaf has taken yet
};
// The pack that a leaf is of, with a buffer of its own or without; null for none.
inline const Pack* pack_of(const Node& leaf) {
  const bool packed = leaf.source.defined() && leaf.source->kind == Source::Kind::Pack;
  return packed ? static_cast<const Pack*>(leaf.source.get()) : nullptr;
}

// One number everywhere: what `torch.zeros` made, until a program reads it. Leaves may share it.
struct NumberFill final : Source {
  NumberFill(c10::IValue n, c10::DeviceIndex d) : Source(Kind::NumberFill), number(std::move(n)), device(d) {
    ++living;
  }
  ~NumberFill() override { --living; }
  void fetch(const NodePtr& leaf) override;

  static std::atomic<int64_t> living;
  const c10::IValue number;
  const c10::DeviceIndex device;
};
// Gives all leaves buffers that are still to be filled, then raises the first error; `failed` are those without room.
// Wants the GIL, not the recorder's lock.
void fetch_fills(const Vector<NodePtr>& leaves, std::vector<size_t>& failed);

// Gives a leaf a buffer of its own, unless another thread did meanwhile. Wants the recorder's lock.
inline void install_buffer(Node& leaf, PyObject* stolen_buffer) {
  release_object(leaf.buffer == nullptr ? std::exchange(leaf.buffer, stolen_buffer) : stolen_buffer);
}
// Sees to it that a leaf has a buffer of its own. Wants the GIL, not the recorder's lock.
void fetch_buffer(const NodePtr& leaf);

// Where a leaf's values are, if they are somewhere.
inline Location find_values(const Node& leaf) {
  return leaf.buffer != nullptr || !leaf.source.defined() ? Location{leaf.buffer} : leaf.source->find(leaf);
}
// Where a leaf's values are on the device, which they are brought to. Wants the GIL, not the recorder's lock.
Location locate(const NodePtr& leaf);

}  // namespace torch_xla
