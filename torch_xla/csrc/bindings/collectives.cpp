#include "bindings/bindings.h"
#include "run/collective_kernel.h"

namespace torch_xla {

void bind_collectives(py::module_& m) {
  m.def("collective_kernel_target", &collective_kernel_target);
  m.def("set_collective_rank", &set_collective_rank);
  m.def("add_collective_group", &add_collective_group);
  m.def("collective_wait", []() -> py::object {
    const auto wait = collective_wait();
    if (wait.ranks.empty()) {
      return py::none();
    }
    return py::make_tuple(wait.ranks, wait.what, wait.count, wait.seconds);
  });
  m.def("take_collective_failure", []() -> py::object {
    const auto failure = take_collective_failure();
    return failure ? py::object(py::make_tuple(failure->what, failure->differing)) : py::none();
  });
  m.def("stop_collectives", &stop_collectives);
}

}  // namespace torch_xla
