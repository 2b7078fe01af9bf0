// Which small buffers a program takes and gives as one (a pack): a client's cost per buffer is that of copying 16 KB.
#pragma once
#include <torch/csrc/utils/pybind.h>

#include <vector>

#include "cut/graph.h"

namespace torch_xla {

// Depends on the graph and its stacks alone, so that all steps of a loop have the same packs. Stacks come first: each
// is an array of its members. Most other packs are of leaves that the graph overwrites; their outputs come back as one
// buffer, which the next step takes as it is. A pack without outputs is only read; its leaves rest in the buffer from
// then on.
class Packing {
 public:
  struct BufferSlot {
    int32_t pack = -1;   // none
    uint32_t index = 0;  // among the members of the pack, or among the single ones
  };
  explicit Packing(const Graph& graph);

  std::vector<Members> packs;
  std::vector<std::shared_ptr<const Pack::Layout>> layouts;
  std::vector<BufferSlot> leaves;   // per leaf
  std::vector<BufferSlot> results;  // per output
  const Vector<bool> donated;       // per leaf

  // The program's buffers: single leaves, then packs. Wants the GIL, not the recorder's lock.
  std::vector<py::object> gather(const Arguments& arguments) const;
  // What a run gave, packs first, as one result per output.
  Vector<Arguments::Result> results_of(const py::tuple& buffers) const;

 private:
  void form(const Graph& graph);
  // Groups of outputs that the same operators update.
  std::vector<Members> group_by_update(const Graph& graph, const std::vector<int64_t>& predecessors) const;
  void pack_updated(const Graph& graph, const std::vector<Members>& groups);
  void pack_gradients(const Graph& graph, const std::vector<int64_t>& predecessors, const std::vector<Members>& groups);
  // Makes a pack of what was collected, if that is `least` buffers or more.
  void close_pack(const Graph& graph, Members& pack, size_t least, bool stacked = false);
  py::object assemble(size_t pack, const Arguments& arguments) const;
};

}  // namespace torch_xla
