#include "run/leaf_values.h"

#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstddef>
#include <string>

#include "base/python_hooks.h"
#include "tensor/lazy_clone.h"

namespace torch_xla {

namespace {

using at::Tensor;

// Raises what the program has to say that makes a buffer and failed.
void wait_for(PyObject* buffer, size_t input, c10::DeviceIndex device) {
  static auto* const wait = PyUnicode_InternFromString("block_until_ready");
  if (!py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(buffer, wait))) {
    const py::error_already_set error;
    if (error.matches(PyExc_Exception)) {
      const auto array = py::reinterpret_borrow<py::object>(buffer);
      TORCH_CHECK(!array.attr("is_deleted")().cast<bool>(), "[run] input ", input, ", ",
                  std::string(py::str(array.attr("aval"))), ", is gone: something outside torch_xla deleted it");
      explain(buffer, device);
    }
    throw error;
  }
}

Tensor on_memory(PyObject* buffer, int64_t start, const Meta& meta) {
  static auto* const name = PyUnicode_InternFromString("unsafe_buffer_pointer");
  const auto options = at::TensorOptions().dtype(meta.dtype);
  if (meta.numel() == 0) {
    return at::empty(meta.sizes, options);
  }
  const auto pointer = py::reinterpret_steal<py::object>(PyObject_CallMethodNoArgs(buffer, name));
  if (!pointer) {
    throw py::error_already_set();
  }
  auto* const bytes = reinterpret_cast<std::byte*>(pointer.cast<uintptr_t>());
  return at::from_blob(bytes + std::max<int64_t>(start, 0) * c10::elementSize(meta.dtype), meta.sizes, options);
}

}  // namespace

Tensor values_of(const NodePtr& leaf, size_t input, c10::DeviceIndex device) {
  if (const auto* const values = find_values(*leaf).values) {
    return *values;
  }
  const auto location = locate(leaf);
  TORCH_CHECK(location.buffer != nullptr, "[run] an input has no buffer");
  wait_for(location.buffer, input, device);
  return on_memory(location.buffer, location.start, leaf->meta(0));
}

}  // namespace torch_xla
