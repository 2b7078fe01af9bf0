#include <unistd.h>

#include <csignal>
#include <tuple>

#include "bindings/bindings.h"
#include "run/collective_kernel.h"

namespace torch_xla {

void bind_collectives(py::module_& m) {
  m.def("collective_kernel_target", &collective_kernel_target);
  using Numbers = std::vector<int64_t>;
  py::class_<Collective>(m, "Collective")
      .def(py::init<std::string, Numbers, Numbers, Numbers, int64_t, int64_t, Numbers, Numbers>(), py::arg("kind"),
           py::arg("groups"), py::arg("sizes"), py::arg("ahead"), py::arg("reduction"), py::arg("root"),
           py::arg("sources"), py::arg("targets"))
      .def("run", &run_collective, py::arg("inputs"), py::arg("outputs"), py::call_guard<py::gil_scoped_release>());
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
  // Before whatever C handler is there: Python's of a fault shows the stack alone.
  m.def("tell_at_sigterm", [](std::string text) {
    static std::string told;
    static struct sigaction next;
    told = std::move(text);
    sigaction(SIGTERM, nullptr, &next);
    struct sigaction own = next;
    own.sa_handler = [](int signal) {
      std::ignore = write(STDERR_FILENO, told.data(), told.size());
      next.sa_handler(signal);
    };
    sigaction(SIGTERM, &own, nullptr);
  });
}

}  // namespace torch_xla
