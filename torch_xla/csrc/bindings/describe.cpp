#include "bindings/describe.h"

#include <torch/csrc/jit/python/pybind_utils.h>

#include <cstdio>

namespace torch_xla {

py::object to_python(const c10::IValue& value) {
  // PyTorch's own does not know whole numbers of 2^63 or more.
  return value.isUnsigned() ? py::int_(value.toUInt()) : torch::jit::toPyObject(value);
}

py::object describe_meta(const Meta& meta) {
  if (!meta.defined()) {
    return py::none();
  }
  return py::make_tuple(py::tuple(py::cast(c10::IntArrayRef(meta.sizes))), meta.dtype);
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
