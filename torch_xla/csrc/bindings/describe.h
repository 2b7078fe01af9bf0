// Values of the recorder as Python takes them.
#pragma once
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "base/user_line.h"
#include "ir/node.h"
#include "tensor/source.h"

namespace torch_xla {

py::object dtype_object(at::ScalarType dtype);
// (sizes, dtype); None where it is undefined.
py::object describe_meta(const Meta& meta);
py::object describe_frame(Frame frame);
// (buffer, start); steals the reference.
py::object describe_location(const Location& location);
std::string hex(const Hash& hash);
// A constant of a recorded call; sequences become lists.
py::object to_python(const c10::IValue& value);
at::ScalarType dtype_of(const py::object& dtype);

}  // namespace torch_xla
