#include "bindings/bindings.h"
#include "bindings/describe.h"
#include "cut/loop_detection.h"
#include "loops/call_trace.h"

namespace torch_xla {

namespace {

// A method of the call trace of a device, which is the first argument.
template <class... Arguments, class Method>
auto of_trace(Method method) {
  return [method](c10::DeviceIndex device, Arguments... arguments) {
    const RecorderLock lock;
    return (call_trace_of(device).*method)(arguments...);
  };
}

}  // namespace

void bind_loops(py::module_& m) {
  m.attr("LONGEST_TRACE") = CallTrace::kLongest;
  m.def(
      "trace_calls",
      [](bool on, size_t first_look, size_t least_segment) { trace_calls(on, {first_look, least_segment}); },
      py::arg("on"), py::arg("first_look") = TraceLimits().first_look,
      py::arg("least_segment") = TraceLimits().least_segment);
  m.def("traces_calls", &traces_calls);
  // (calls, values that cross, line) of a loop that was not known, followed from then on if asked for; None where there
  // is none.
  m.def(
      "find_loop",
      [](c10::DeviceIndex device, bool growing, bool follow) -> py::object {
        const auto loop = detect_loop(device, growing, follow);
        return loop ? py::object(py::make_tuple(loop->calls, loop->carried, loop->frame)) : py::none();
      },
      py::arg("device"), py::arg("growing") = false, py::arg("follow") = true);
  m.def("calls_since_barrier", of_trace(&CallTrace::calls));
  m.def("is_looping", of_trace(&CallTrace::looping));
  m.def("was_cut", of_trace(&CallTrace::was_cut));
  m.def("no_loop_found", of_trace(&CallTrace::no_loop_found));
  m.def("segment_ends", of_trace(&CallTrace::ends));
  m.def("drop_segment_ends", of_trace<uint64_t>(&CallTrace::drop_ends));
  m.def("expects_whole_step", of_trace(&CallTrace::expects_whole_step));
  m.def("end_call_trace", of_trace(&CallTrace::barrier));
}

}  // namespace torch_xla
