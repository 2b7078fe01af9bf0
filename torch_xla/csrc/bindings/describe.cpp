#include "bindings/describe.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

#include <cstdio>

namespace torch_xla {

py::object dtype_object(at::ScalarType dtype) {
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype)));
}

at::ScalarType dtype_of(const py::object& dtype) { return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type; }

py::object describe_meta(const Meta& meta) {
  if (!meta.defined()) {
    return py::none();
  }
  py::tuple sizes(meta.sizes.size());
  for (size_t i = 0; i < meta.sizes.size(); ++i) {
    sizes[i] = meta.sizes[i];
  }
  return py::make_tuple(sizes, dtype_object(meta.dtype));
}

py::object describe_frame(Frame frame) {
  return frame != nullptr ? py::object(py::str(*frame)) : py::object(py::none());
}

py::object describe_location(const Location& location) {
  if (location.buffer == nullptr) {
    return py::none();
  }
  return py::make_tuple(py::reinterpret_steal<py::object>(location.buffer), location.start);
}

std::string hex(const Hash& hash) {
  char text[33];
  std::snprintf(text, sizeof(text), "%016llx%016llx", static_cast<unsigned long long>(hash.hi),
                static_cast<unsigned long long>(hash.lo));
  return text;
}

}  // namespace torch_xla
