// Which small buffers a program takes and gives together: a client's cost per buffer is that of copying 16 KB or more.
#pragma once
#include <torch/csrc/utils/pybind.h>

#include <vector>

#include "cut/graph.h"

namespace torch_xla {

// A function of the graph alone, so that every step of a loop has the same. Most packs are of leaves that the graph
// overwrites, and come back with what takes their place: the next step's input as it is. The others have no leaves, and
// come last.
class Packing {
 public:
  struct Place {
    int32_t pack = -1;   // none
    uint32_t index = 0;  // among the members of the pack, or among the single ones
  };
  struct Members {
    std::vector<uint32_t> leaves;
    std::vector<uint32_t> outputs;
  };

  explicit Packing(const Graph& graph);

  std::vector<Members> packs;
  std::vector<std::shared_ptr<const Pack::Layout>> layouts;
  std::vector<Place> leaves;   // per leaf
  std::vector<Place> results;  // per output
  const Vector<bool> donated;  // per leaf

  // The program's buffers: single leaves, then packs. Wants the GIL, not the recorder's lock.
  std::vector<py::object> gather(const Arguments& arguments) const;
  // What a run gave, packs first, as one result per output.
  Vector<Arguments::Result> results_of(const py::tuple& given) const;

 private:
  void form(const Graph& graph);
  // Makes a pack of what was collected, if it is `least` or more.
  void close(const Graph& graph, Members& pack, size_t least);
  void keep_held(std::vector<py::object>& buffers) const;
};

}  // namespace torch_xla
