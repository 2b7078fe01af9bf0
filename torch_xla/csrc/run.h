// Running: input buffers in, results attached.
#pragma once
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "graph.h"
#include "packing.h"

namespace torch_xla {

// What a run needs to know of a compiled graph.
class Program {
 public:
  Program(Graph& graph, bool waits) : packing(graph), sharing(graph.sharing()), waits(waits) {}

  const Packing packing;
  const std::shared_ptr<const Sharing> sharing;
  const bool waits;  // for a run before its results count, because a host callback in it can fail
  py::object run;    // starts it, as dispatch.py tells

  // The buffers of the graph's numbers; those of the latest run, where the numbers did not change. `put` moves a NumPy
  // array to a device.
  std::vector<py::object> numbers(const Graph& graph, const py::object& put);

 private:
  struct Sent {
    std::string bytes;
    py::object buffer;
  };
  std::array<Sent, 3> sent_;  // by type
};

// Starts a program on the buffers of a graph and gives its results to the tensors, without waiting for them unless it
// `waits`. Returns the token of the run, whose duration is a sample of the metric `stage`.
py::object execute(Graph& graph, Program& program, const py::object& put, std::string_view stage);

}  // namespace torch_xla
