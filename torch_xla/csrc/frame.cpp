#include "frame.h"

#include <Python.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>
#include <unordered_map>
#include <vector>

#include "python_hooks.h"

namespace torch_xla {

namespace {

constexpr size_t kCodeObjects = 1 << 16;  // that are remembered

std::vector<std::string>& skipped() {
  static auto* const prefixes = new std::vector<std::string>();
  return *prefixes;
}

std::atomic<int> depth{0};
thread_local Frame current_frame = nullptr;

// What is known of a code object, under the GIL. It is kept alive, so that its address is not used again.
struct Code {
  bool skip = false;
  std::unordered_map<int, Frame> lines;  // by instruction
};
std::unordered_map<PyCodeObject*, Code>& codes() {
  static auto* const known = new std::unordered_map<PyCodeObject*, Code>();
  return *known;
}

Code& code_of(PyCodeObject* object) {
  auto& known = codes();
  const auto found = known.find(object);
  if (found != known.end()) {
    return found->second;
  }
  if (known.size() >= kCodeObjects) {
    for (const auto& [old, unused] : known) {
      Py_DECREF(old);
    }
    known.clear();
  }
  Py_INCREF(object);
  auto& code = known[object];
  const char* const file = PyUnicode_AsUTF8(object->co_filename);
  const std::string_view name = file != nullptr ? file : "<frozen";
  const auto starts = [&](std::string_view prefix) { return name.substr(0, prefix.size()) == prefix; };
  code.skip = starts("<frozen") || starts("<eval_with_key") || std::any_of(skipped().begin(), skipped().end(), starts);
  return code;
}

// Under the GIL.
Frame intern(std::string text) {
  static auto* const texts = new std::unordered_map<std::string, Frame>();
  auto& kept = (*texts)[text];
  if (kept == nullptr) {
    kept = new std::string(std::move(text));
  }
  return kept;
}

Frame line_of(PyFrameObject* frame, PyCodeObject* object) {
  const char* const file = PyUnicode_AsUTF8(object->co_filename);
  const char* const name = PyUnicode_AsUTF8(object->co_name);
  return intern(std::string(file != nullptr ? file : "?") + ":" + std::to_string(PyFrame_GetLineNumber(frame)) +
                " in " + (name != nullptr ? name : "?"));
}

// Calls `visit` with the user's frames of this thread, innermost first, until it returns false. A line costs some 100
// ns once it is known: found by the address of its code and the instruction.
template <class Visit>
void walk(Visit visit) {
  if (!Py_IsInitialized() || PyGILState_GetThisThreadState() == nullptr) {
    return;
  }
  const py::gil_scoped_acquire gil;
  PyFrameObject* frame = PyEval_GetFrame();
  Py_XINCREF(frame);
  bool more = true;
  while (frame != nullptr && more) {
    PyCodeObject* const object = PyFrame_GetCode(frame);
    auto& code = code_of(object);
    if (!code.skip) {
      auto& line = code.lines[PyFrame_GetLasti(frame)];
      if (line == nullptr) {
        line = line_of(frame, object);
      }
      more = visit(line);
    }
    Py_DECREF(object);
    PyFrameObject* const back = more ? PyFrame_GetBack(frame) : nullptr;
    Py_DECREF(frame);
    frame = back;
  }
}

}  // namespace

void set_frame_depth(int lines) { depth.store(lines, std::memory_order_relaxed); }

FrameScope::FrameScope() {
  const auto lines = depth.load(std::memory_order_relaxed);
  // Where every operator is a graph of its own, the line that records it is the one that runs it.
  if (lines == 1 && !eager()) {
    current_frame = user_frame();
  } else if (lines > 1) {
    current_frame = user_frames(lines);
  }
}
FrameScope::~FrameScope() { current_frame = nullptr; }

Frame recorded_frame() { return current_frame; }

void add_skipped_prefix(std::string prefix) { skipped().push_back(std::move(prefix)); }

Frame user_frame() {
  Frame found = nullptr;
  walk([&](Frame frame) {
    found = frame;
    return false;
  });
  return found;
}

Frame user_frames(int lines) {
  std::string text;
  walk([&](Frame frame) {
    text += (text.empty() ? "" : " < ") + *frame;
    return --lines > 0;
  });
  if (text.empty()) {
    return nullptr;
  }
  const py::gil_scoped_acquire gil;
  return intern(std::move(text));
}

}  // namespace torch_xla
