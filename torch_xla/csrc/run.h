// Running: input buffers in, results attached.
#pragma once
#include <torch/csrc/utils/pybind.h>

#include "graph.h"
#include "packing.h"

namespace torch_xla {

// Starts a program on the buffers of a graph and gives its results to the tensors, without waiting for them unless
// `wait`. `run` is the executable's method, `numbers` the packed numbers. Returns the token of the run.
py::object execute(Graph& graph, const py::object& run, const Packing& packing, const py::list& numbers, bool wait);

}  // namespace torch_xla
