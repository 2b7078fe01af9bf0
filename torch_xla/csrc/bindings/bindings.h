// What each file of this folder adds to the Python module.
#pragma once
#include <torch/csrc/utils/pybind.h>

namespace torch_xla {

void bind_graphs(py::module_& m);
void bind_runs(py::module_& m);
void bind_tensors(py::module_& m);
void bind_recorder(py::module_& m);
void bind_collectives(py::module_& m);
void bind_loops(py::module_& m);
void bind_imports(py::module_& m);
void bind_calls(py::module_& m);

}  // namespace torch_xla
