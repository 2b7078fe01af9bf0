#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "bindings/bindings.h"
#include "bindings/describe.h"
#include "device/capture.h"
#include "run/captured.h"
#include "run/direct_read.h"
#include "run/executable_cache.h"
#include "run/host_kernel.h"
#include "run/host_operators.h"
#include "run/in_flight.h"
#include "run/program.h"

namespace torch_xla {

namespace {

void bind_captures(py::module_& m) {
  py::class_<CapturedGraph>(m, "CapturedGraph")
      .def(py::init<const Graph&>())
      .def("set_program", &CapturedGraph::set_program, py::arg("graph"), py::arg("program"))
      .def("replay", &CapturedGraph::replay);
  py::class_<Capture>(m, "Capture")
      .def(py::init<c10::DeviceIndex>())
      .def("begin", &Capture::begin)
      .def("end", &Capture::end);
  m.def("is_captured", &is_captured);
  m.def("captures_here", &captures_here);
}

}  // namespace

void bind_runs(py::module_& m) {
  bind_captures(m);
  py::class_<Program, std::shared_ptr<Program>>(m, "Program")
      .def(py::init([](Graph& graph, bool waits) {
             graph.check();
             return std::make_shared<Program>(graph, waits);
           }),
           py::arg("graph"), py::arg("waits"))
      .def_readonly("packing", &Program::packing)
      .def_readonly("waits", &Program::waits)
      .def("set_placements", &Program::set_placements, py::arg("inputs"), py::arg("outputs"))
      .def("place_fills", [](const Program& program, const Graph& graph) { program.place_fills(graph); })
      .def_readwrite("starter", &Program::starter)
      .def_readwrite("on_start", &Program::on_start)
      .def_property_readonly("run", &Program::run);
  py::class_<ExecutableCache>(m, "ExecutableCache")
      .def(py::init<>())
      .def("find", &ExecutableCache::find)
      .def("knows", &ExecutableCache::knows)
      .def("run", &ExecutableCache::run)
      .def("add", &ExecutableCache::add)
      .def("drop", &ExecutableCache::drop)
      .def("clear", &ExecutableCache::clear)
      .def("values", &ExecutableCache::values)
      .def("__len__", &ExecutableCache::size)
      .def_readonly("hits", &ExecutableCache::hits);
  m.attr("MAX_PROGRAMS_IN_FLIGHT") = kMaxProgramsInFlight;
  py::class_<InFlight>(m, "InFlight")
      .def_property("operator_run", &InFlight::operator_run, &InFlight::set_operator_run)
      .def_property_readonly("programs", &InFlight::programs)
      .def("add_program", &InFlight::add_program)
      .def("wait_for_programs", &InFlight::wait_for_programs, py::arg("left") = 0)
      .def("take_programs", &InFlight::take_programs)
      .def_property_readonly("idle", &InFlight::idle)
      .def_readonly("failures", &InFlight::failures);
  m.def("in_flight", &InFlight::of, py::return_value_policy::reference);
  // At its very end, where an exit code can still be chosen; Python's own handlers cannot.
  m.def("exit_with_failure", [] {
    Py_AtExit([] {
      std::fflush(nullptr);
      std::_Exit(1);
    });
  });
  m.def("buffers_on", [](c10::DeviceIndex device) {
    return listed(buffers_on(device), [](PyObject* buffer) { return py::reinterpret_steal<py::object>(buffer); });
  });
  m.def("lose_buffers", [](c10::DeviceIndex device, const std::vector<py::object>& buffers, const std::string& error) {
    std::vector<PyObject*> failed;
    std::transform(buffers.begin(), buffers.end(), std::back_inserter(failed), [](const auto& b) { return b.ptr(); });
    lose_buffers(device, failed, error);
  });
  m.def("in_eager_operation", &in_eager_operation);
  m.def("set_eager_operation", &set_eager_operation);
  m.def("read_directly", &read_directly);
  m.def("host_kernel_target", &host_kernel_target);
  m.def("unchecked_index_operators", &unchecked_index_operators);
  m.def("note_wait", &note_wait);
}

}  // namespace torch_xla
