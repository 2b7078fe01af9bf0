// Values of the recorder as Python takes them. Lines and module paths need nothing: a null pointer to a string is None.
#pragma once
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "ir/node.h"
#include "tensor/source.h"

namespace torch_xla {

// (sizes, dtype); None where it is undefined.
py::object describe_meta(const Meta& meta);
// (buffer, start); steals the reference.
py::object describe_location(const Location& location);
std::string hex(const Hash& hash);
// A constant of a recorded call; sequences become lists.
py::object to_python(const c10::IValue& value);

// What `describe` gives for each element, as a list.
template <class Range, class Describe>
py::list listed(const Range& range, Describe describe) {
  py::list items;
  for (const auto& element : range) {
    items.append(describe(element));
  }
  return items;
}

}  // namespace torch_xla
