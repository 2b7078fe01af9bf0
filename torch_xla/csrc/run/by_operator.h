// Running a graph operator by operator with PyTorch's CPU kernels: where it has no program, and may never get one.
#pragma once
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <vector>

#include "cut/graph.h"

namespace torch_xla {

// Computes a graph and gives its results to their tensors. `leaves` has a CPU tensor per leaf; without it the graph's
// device is the host, and they are read where they are.
//
// `rule` is a Python function that computes a node by its lowering rule, as a program does: what the CPU has no kernel
// for, and what its kernel refuses, so that no error depends on whether a graph is compiled. It takes the node's
// position and its inputs as CPU tensors, and gives a list of its results.
void run_by_operator(Graph& graph, const py::object& rule, const std::optional<std::vector<at::Tensor>>& leaves);

}  // namespace torch_xla
