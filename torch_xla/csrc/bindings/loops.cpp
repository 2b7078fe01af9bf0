#include "bindings/bindings.h"
#include "bindings/describe.h"
#include "cut/repetition.h"
#include "loops/stream.h"

namespace torch_xla {

void bind_loops(py::module_& m) {
  const auto stream = [](int device) -> Stream& { return stream_of(static_cast<c10::DeviceIndex>(device)); };
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
      [](int device, bool growing, bool follow) -> py::object {
        const auto found = find_repetition(static_cast<c10::DeviceIndex>(device), growing, follow);
        return found ? py::object(py::make_tuple(found->calls, found->crossing, found->frame)) : py::none();
      },
      py::arg("device"), py::arg("growing") = false, py::arg("follow") = true);
  m.def("calls_since_barrier", [stream](int device) {
    const RecorderLock lock;
    return stream(device).calls();
  });
  m.def("is_looping", [stream](int device) {
    const RecorderLock lock;
    return stream(device).looping();
  });
  m.def("was_cut", [stream](int device) {
    const RecorderLock lock;
    return stream(device).was_cut();
  });
  m.def("nothing_found", [stream](int device) {
    const RecorderLock lock;
    return stream(device).nothing_found();
  });
  m.def("piece_ends", [stream](int device) {
    const RecorderLock lock;
    return stream(device).ends();
  });
  m.def("drop_piece_ends", [stream](int device, uint64_t until) {
    const RecorderLock lock;
    stream(device).drop_ends(until);
  });
  m.def("whole_comes", [stream](int device) {
    const RecorderLock lock;
    return stream(device).whole_comes();
  });
  m.def("end_stream", [stream](int device) {
    const RecorderLock lock;
    stream(device).barrier();
  });
}

}  // namespace torch_xla
