#include "bindings/bindings.h"
#include "bindings/describe.h"
#include "cut/repetition.h"
#include "loops/stream.h"

namespace torch_xla {

namespace {

// A method of the stream of a device, which is the first argument.
template <class... Arguments, class Method>
auto of_stream(Method method) {
  return [method](c10::DeviceIndex device, Arguments... arguments) {
    const RecorderLock lock;
    return (stream_of(device).*method)(arguments...);
  };
}

}  // namespace

void bind_loops(py::module_& m) {
  m.attr("LONGEST_STREAM") = Stream::kLongest;
  m.def(
      "follow_streams",
      [](bool on, size_t first_look, size_t least_piece) { follow_streams(on, {first_look, least_piece}); },
      py::arg("on"), py::arg("first_look") = StreamLimits().first_look,
      py::arg("least_piece") = StreamLimits().least_piece);
  m.def("follows_streams", &follows_streams);
  // (calls, values that cross, line) of a loop that was not known, followed from then on if asked for; None where there
  // is none.
  m.def(
      "find_loop",
      [](c10::DeviceIndex device, bool growing, bool follow) -> py::object {
        const auto found = find_repetition(device, growing, follow);
        return found ? py::object(py::make_tuple(found->calls, found->crossing, found->frame)) : py::none();
      },
      py::arg("device"), py::arg("growing") = false, py::arg("follow") = true);
  m.def("calls_since_barrier", of_stream(&Stream::calls));
  m.def("is_looping", of_stream(&Stream::looping));
  m.def("was_cut", of_stream(&Stream::was_cut));
  m.def("nothing_found", of_stream(&Stream::nothing_found));
  m.def("piece_ends", of_stream(&Stream::ends));
  m.def("drop_piece_ends", of_stream<uint64_t>(&Stream::drop_ends));
  m.def("whole_comes", of_stream(&Stream::whole_comes));
  m.def("end_stream", of_stream(&Stream::barrier));
}

}  // namespace torch_xla
