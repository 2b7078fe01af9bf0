#include "bindings/describe.h"

#include <pybind11/complex.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

#include <cstdio>

#include "ir/op_info.h"

namespace torch_xla {

py::object dtype_object(at::ScalarType dtype) {
  return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype)));
}

at::ScalarType dtype_of(const py::object& dtype) { return reinterpret_cast<THPDtype*>(dtype.ptr())->scalar_type; }

py::object to_python(const c10::IValue& value) {
  if (value.isNone()) {
    return py::none();
  }
  if (value.isBool()) {
    return py::bool_(value.toBool());
  }
  if (value.isInt()) {
    return py::int_(value.toInt());
  }
  if (value.isUnsigned()) {
    return py::int_(value.toUInt());
  }
  if (value.isDouble()) {
    return py::float_(value.toDouble());
  }
  if (value.isComplexDouble()) {
    return py::cast(static_cast<std::complex<double>>(value.toComplexDouble()));
  }
  if (value.isString()) {
    return py::str(value.toStringRef());
  }
  if (value.isList()) {
    py::list elements;
    for (const c10::IValue& element : value.toListRef()) {
      elements.append(to_python(element));
    }
    return elements;
  }
  if (value.isDevice()) {
    return py::cast(value.toDevice());
  }
  if (value.isTensor()) {
    return py::cast(value.toTensor());
  }
  C10_THROW_ERROR(TypeError, "[record] got a constant of kind " + value.tagKind() +
                                 ", expected a number, a string, a device, a tensor or a list of these");
}

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
