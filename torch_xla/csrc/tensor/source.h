// Where the buffer of a leaf is, if it has none of its own yet.
#pragma once
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
  Pack(PyObject* stolen_buffer, std::shared_ptr<const Layout> l) : buffer(stolen_buffer), layout(std::move(l)) {}
  ~Pack() override { let_go(); }
  void release_resources() override { let_go(); }
  void let_go();
  void fetch(const NodePtr& leaf) override;
  Pack* pack() override { return this; }
  // Whether these leaves, in this order, are all it holds.
  bool holds(const Vector<NodePtr>& all, const std::vector<uint32_t>& slots) const;
  // Index of a member's first element in the buffer.
  int64_t start_of(const Node& leaf) const { return layout->starts.at(leaf.place); }

  PyObject* buffer;  // the members end to end, of one dimension where it is no stack
  const std::shared_ptr<const Layout> layout;

 private:
  std::vector<PyObject*> parts_;  // once one was wanted: those that no leaf has taken yet
};

// Sees to it that a leaf has a buffer of its own. Wants the GIL, not the recorder's lock.
void fetch_buffer(const NodePtr& leaf);

// A leaf's values as (buffer, index of their first element in it), -1 where the buffer holds nothing else. Borrowed.
struct Location {
  PyObject* buffer = nullptr;
  int64_t start = -1;
};
Location locate(const NodePtr& leaf);

}  // namespace torch_xla
