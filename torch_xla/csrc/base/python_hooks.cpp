#include "base/python_hooks.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <new>
#include <type_traits>

namespace torch_xla {

namespace {

PyObject* hooks = nullptr;
std::atomic<bool> eager_mode{false};
thread_local int suspended = 0;  // regions of this thread

// References to the elements of what a hook gave.
using Objects = std::vector<PyObject*>;

py::object argument(PyObject* object) { return py::reinterpret_borrow<py::object>(object); }

py::object argument(const Objects& objects) {
  py::list list;
  for (auto* const object : objects) {
    list.append(py::handle(object));
  }
  return list;
}

py::object argument(const std::vector<std::vector<int64_t>>& shapes) {
  py::tuple sizes(shapes.size());
  for (size_t i = 0; i < shapes.size(); ++i) {
    sizes[i] = py::tuple(py::cast(shapes[i]));
  }
  return sizes;
}

py::object argument(c10::ArrayRef<c10::IValue> values) {
  py::tuple items(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    items[i] = torch::jit::toPyObject(values[i]);
  }
  return items;
}

py::object argument(const c10::IValue& value) { return torch::jit::toPyObject(value); }

template <class Value>
py::object argument(const Value& value) {
  return py::cast(value);
}

// Calls a hook. Results that are objects are new references.
template <class Result, class... Arguments>
Result call_hook(const char* method, const Arguments&... arguments) {
  const py::gil_scoped_acquire gil;
  try {
    TORCH_CHECK(hooks != nullptr, "[device] torch_xla is not initialised; import torch_xla first");
    auto result = py::handle(hooks).attr(method)(argument(arguments)...);
    if constexpr (std::is_same_v<Result, PyObject*>) {
      return result.release().ptr();
    } else if constexpr (std::is_same_v<Result, Objects>) {
      Objects references;
      for (const auto& item : result) {
        references.push_back(py::reinterpret_borrow<py::object>(item).release().ptr());
      }
      return references;
    } else if constexpr (!std::is_void_v<Result>) {
      return result.template cast<Result>();
    }
  } catch (py::error_already_set& e) {
    // PyTorch carries this type across its threads and restores the exception in the caller.
    e.restore();
    python_error error;
    error.persist();
    throw error;
  }
}

}  // namespace

PyObject* upload(const at::Tensor& cpu, c10::DeviceIndex device, uint32_t placement, bool immutable) {
  return call_hook<PyObject*>("upload", cpu, device, placement, immutable);
}

PyObject* fill(c10::IntArrayRef sizes, at::ScalarType dtype, const c10::IValue& number, c10::DeviceIndex device,
               const std::string* line, uint32_t placement) {
  return call_hook<PyObject*>("fill", sizes, dtype, number, device, line, placement);
}

Objects copy(const Objects& buffers) { return call_hook<Objects>("copy", buffers); }

PyObject* pack(const Objects& buffers, bool stacked) { return call_hook<PyObject*>("pack", buffers, stacked); }

PyObject* member(PyObject* stack, size_t place) { return call_hook<PyObject*>("member", stack, place); }

Objects unpack(PyObject* buffer, const std::vector<std::vector<int64_t>>& shapes) {
  return call_hook<Objects>("unpack", buffer, shapes);
}

PyObject* put(PyObject* numbers, c10::DeviceIndex device) { return call_hook<PyObject*>("put", numbers, device); }

void explain(PyObject* token, c10::DeviceIndex device) { call_hook<void>("explain", token, device); }

at::Tensor fetch(const at::Tensor& xla) { return call_hook<at::Tensor>("fetch", xla, xla.device().index()); }

bool query(c10::DeviceIndex device) { return call_hook<bool>("query", device); }

void synchronize(c10::DeviceIndex device) { call_hook<void>("synchronize", device); }

void note_read(const char* op) { call_hook<void>("note_read", op); }

void evaluate(const std::vector<at::Tensor>& tensors) { call_hook<void>("evaluate", tensors); }

void note_host_op(const std::string& op, const std::string& reason) { call_hook<void>("note_host_op", op, reason); }

void cut_loop(c10::DeviceIndex device) { call_hook<void>("cut_loop", device); }

bool is_lowered(const std::string& op) { return call_hook<bool>("is_lowered", op); }

bool needs_host(const std::string& op) { return call_hook<bool>("needs_host", op); }

double check_call(const std::string& op, const std::string& recorded, c10::ArrayRef<c10::IValue> arguments,
                  size_t result_bytes, const AskCpu& ask_cpu) {
  const py::gil_scoped_acquire gil;
  const py::cpp_function function(torch::wrap_pybind_function([&](size_t bytes, int fill) { ask_cpu(bytes, fill); }));
  return call_hook<double>("check_call", op, recorded, arguments, result_bytes, function.ptr());
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

bool eager() { return eager_mode.load(std::memory_order_relaxed) && suspended == 0; }
void set_eager(bool on) { eager_mode.store(on, std::memory_order_relaxed); }
void suspend_eager(bool on) { suspended += on ? 1 : -1; }

}  // namespace torch_xla
