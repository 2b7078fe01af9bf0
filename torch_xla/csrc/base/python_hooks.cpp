#include "base/python_hooks.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <new>

namespace torch_xla {

namespace {

PyObject* hooks = nullptr;
std::atomic<bool> eager_on{false};
thread_local int suspended = 0;  // regions of this thread

template <class... Arguments>
py::object call(const char* method, const Arguments&... arguments) {
  try {
    TORCH_CHECK(hooks != nullptr, "[device] torch_xla is not initialised; import torch_xla first");
    return py::handle(hooks).attr(method)(arguments...);
  } catch (py::error_already_set& e) {
    // PyTorch carries this type across its threads and restores the exception in the caller.
    e.restore();
    python_error error;
    error.persist();
    throw error;
  }
}

py::list as_list(const std::vector<PyObject*>& buffers) {
  py::list list;
  for (auto* const buffer : buffers) {
    list.append(py::handle(buffer));
  }
  return list;
}

std::vector<PyObject*> references(const py::object& list) {
  std::vector<PyObject*> found;
  for (const auto& item : list) {
    found.push_back(py::reinterpret_borrow<py::object>(item).release().ptr());
  }
  return found;
}

}  // namespace

PyObject* upload(const at::Tensor& cpu, c10::DeviceIndex device, uint32_t placement, bool kept) {
  const py::gil_scoped_acquire gil;
  return call("upload", cpu, static_cast<int>(device), placement, kept).release().ptr();
}

std::vector<PyObject*> copy(const std::vector<PyObject*>& buffers) {
  const py::gil_scoped_acquire gil;
  return references(call("copy", as_list(buffers)));
}

PyObject* pack(const std::vector<PyObject*>& buffers, bool stacked) {
  const py::gil_scoped_acquire gil;
  return call("pack", as_list(buffers), stacked).release().ptr();
}

PyObject* member(PyObject* stack, size_t place) {
  const py::gil_scoped_acquire gil;
  return call("member", py::handle(stack), place).release().ptr();
}

std::vector<PyObject*> unpack(PyObject* buffer, const std::vector<std::vector<int64_t>>& shapes) {
  const py::gil_scoped_acquire gil;
  py::tuple sizes(shapes.size());
  for (size_t i = 0; i < shapes.size(); ++i) {
    sizes[i] = py::tuple(py::cast(shapes[i]));
  }
  return references(call("unpack", py::handle(buffer), sizes));
}

PyObject* put(PyObject* numbers, c10::DeviceIndex device) {
  const py::gil_scoped_acquire gil;
  return call("put", py::handle(numbers), static_cast<int>(device)).release().ptr();
}

void explain(PyObject* token, c10::DeviceIndex device) {
  const py::gil_scoped_acquire gil;
  call("explain", py::handle(token), static_cast<int>(device));
}

at::Tensor fetch(const at::Tensor& xla) {
  const py::gil_scoped_acquire gil;
  return call("fetch", xla).cast<at::Tensor>();
}

bool query(c10::DeviceIndex device) {
  const py::gil_scoped_acquire gil;
  return call("query", static_cast<int>(device)).cast<bool>();
}

void synchronize(c10::DeviceIndex device) {
  const py::gil_scoped_acquire gil;
  call("synchronize", static_cast<int>(device));
}

void note_read(const char* op) {
  const py::gil_scoped_acquire gil;
  call("note_read", op);
}

void evaluate(const std::vector<at::Tensor>& tensors) {
  const py::gil_scoped_acquire gil;
  call("evaluate", tensors);
}

void note_host_op(const std::string& op, const std::string& reason) {
  const py::gil_scoped_acquire gil;
  call("note_host_op", op, reason);
}

void cut_loop(c10::DeviceIndex device) {
  const py::gil_scoped_acquire gil;
  call("cut_loop", static_cast<int>(device));
}

bool is_lowered(const std::string& op) {
  const py::gil_scoped_acquire gil;
  return call("is_lowered", op).cast<bool>();
}

bool needs_host(const std::string& op) {
  const py::gil_scoped_acquire gil;
  return call("needs_host", op).cast<bool>();
}

double check_call(const std::string& op, const std::string& recorded, c10::ArrayRef<c10::IValue> arguments,
                  size_t result_bytes, const AskCpu& ask) {
  const py::gil_scoped_acquire gil;
  py::tuple given(arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) {
    given[i] = torch::jit::toPyObject(arguments[i]);
  }
  const py::cpp_function function(torch::wrap_pybind_function([&](size_t bytes, int fill) { ask(bytes, fill); }));
  return call("check_call", op, recorded, given, result_bytes, function).cast<double>();
}

bool refuses_call(std::exception& error) {
  if (auto* const python = dynamic_cast<python_error*>(&error)) {
    const py::gil_scoped_acquire gil;
    python->persist();  // it is still raised where a Python kernel threw it, and another may run now
    return PyErr_GivenExceptionMatches(python->type, PyExc_Exception) != 0 &&
           PyErr_GivenExceptionMatches(python->type, PyExc_MemoryError) == 0;
  }
  if (auto* const python = dynamic_cast<py::error_already_set*>(&error)) {
    const py::gil_scoped_acquire gil;
    return python->matches(PyExc_Exception) && !python->matches(PyExc_MemoryError);
  }
  return dynamic_cast<std::bad_alloc*>(&error) == nullptr && dynamic_cast<c10::OutOfMemoryError*>(&error) == nullptr;
}

void set_python_hooks(PyObject* h) {
  Py_XINCREF(h);
  hooks = h;
}

bool eager() { return eager_on.load(std::memory_order_relaxed) && suspended == 0; }
void set_eager(bool on) { eager_on.store(on, std::memory_order_relaxed); }
void suspend_eager(bool on) { suspended += on ? 1 : -1; }

}  // namespace torch_xla
