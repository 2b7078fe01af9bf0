#include "frame.h"

#include <Python.h>
#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <vector>

namespace torch_xla {

namespace {
std::vector<std::string>& skipped() {
  static auto* const prefixes = new std::vector<std::string>();
  return *prefixes;
}
std::atomic<bool> frames_on{false};
thread_local std::unique_ptr<std::string> current_frame;
}  // namespace

void set_frames(bool on) { frames_on.store(on, std::memory_order_relaxed); }

FrameScope::FrameScope() {
  if (frames_on.load(std::memory_order_relaxed)) {
    current_frame = user_frame();
  }
}
FrameScope::~FrameScope() {
  if (current_frame) {
    current_frame.reset();
  }
}
const std::string* recorded_frame() { return current_frame.get(); }

void add_skipped_prefix(std::string prefix) { skipped().push_back(std::move(prefix)); }

std::unique_ptr<std::string> user_frame() {
  if (!Py_IsInitialized()) {
    return nullptr;
  }
  const py::gil_scoped_acquire gil;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  std::unique_ptr<std::string> found;
  while (frame != nullptr) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    const char* file = PyUnicode_AsUTF8(code->co_filename);
    bool skip = file == nullptr || file[0] == '<';
    for (const auto& prefix : skipped()) {
      skip = skip || std::string_view(file).substr(0, prefix.size()) == prefix;
    }
    if (!skip) {
      const char* name = PyUnicode_AsUTF8(code->co_name);
      found = std::make_unique<std::string>(std::string(file) + ":" + std::to_string(PyFrame_GetLineNumber(frame)) +
                                            " in " + (name != nullptr ? name : "?"));
      Py_DECREF(code);
      break;
    }
    Py_DECREF(code);
    PyFrameObject* back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  Py_XDECREF(frame);
  return found;
}

}  // namespace torch_xla
