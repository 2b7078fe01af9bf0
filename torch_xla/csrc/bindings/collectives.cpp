#include "bindings/bindings.h"
#include "run/collective_kernel.h"
#include "run/meetings.h"

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
  m.def("stop_collectives", &stop_collectives);
  m.def("meetings", []() {
    py::list found;
    for (const auto& meeting : meetings()) {
      found.append(py::make_tuple(meeting.group, meeting.meaning, meeting.count, meeting.seconds, meeting.failed));
    }
    return found;
  });
  m.def("started", [](int64_t group) {
    const auto found = started(group);
    return py::make_tuple(found.count, found.chain, found.meanings);
  });
}

}  // namespace torch_xla
