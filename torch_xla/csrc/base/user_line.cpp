#include "base/user_line.h"

#include <Python.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/python_frame.h"
#include "base/python_hooks.h"

namespace torch_xla {

namespace {

constexpr size_t kCodeObjects = 1 << 16;  // that are remembered

std::vector<std::string>& skipped() {
  static auto* const prefixes = new std::vector<std::string>();
  return *prefixes;
}

std::atomic<int> depth{0};
thread_local Frame current_frame = nullptr;
// The interpreter's frame that a LineScope is in, which stays where it is, and its line.
thread_local std::pair<const void*, Frame> scope_line{nullptr, nullptr};

// Changes when what `Lines` hold may be wrong.
std::atomic<uint64_t> generation{0};

// What a thread knows of the instructions that its frames are at, to be had without the GIL.
class Lines {
 public:
  // The line of the user, or null for a frame that is skipped; nothing for an unknown instruction.
  std::optional<Frame> find(const void* instruction) {
    const auto& entry = entries_[slot(instruction)];
    return entry.instruction == instruction ? std::optional<Frame>(entry.line) : std::nullopt;
  }
  void add(const void* instruction, Frame line) { entries_[slot(instruction)] = {instruction, line}; }

  static Lines& of_thread() {
    thread_local std::unique_ptr<Lines> lines;
    const auto now = generation.load(std::memory_order_acquire);
    if (lines == nullptr || lines->generation_ != now) {
      lines = std::make_unique<Lines>();
      lines->generation_ = now;
    }
    return *lines;
  }

 private:
  struct Entry {
    const void* instruction = nullptr;
    Frame line = nullptr;
  };
  static constexpr size_t kEntries = 1024;

  static size_t slot(const void* instruction) {
    const auto address = reinterpret_cast<uintptr_t>(instruction);
    return (address >> 1 ^ address >> 11) % kEntries;
  }

  std::array<Entry, kEntries> entries_;
  uint64_t generation_ = 0;
};

struct Code {
  bool skip;     // its frames are not the user's
  bool loader;   // it is PyTorch's DataLoader's
  bool imports;  // it is the import system's
};

// Code objects that were seen; under the GIL. They are kept alive, so that the addresses of their instructions are not
// used again.
std::unordered_map<PyCodeObject*, Code>& codes() {
  static auto* const by_object = new std::unordered_map<PyCodeObject*, Code>();
  return *by_object;
}

Code code_of(PyCodeObject* object) {
  auto& cache = codes();
  const auto it = cache.find(object);
  if (it != cache.end()) {
    return it->second;
  }
  if (cache.size() >= kCodeObjects) {
    generation.fetch_add(1, std::memory_order_release);
    for (const auto& [old, unused] : cache) {
      Py_DECREF(old);
    }
    cache.clear();
  }
  Py_INCREF(object);
  const char* const file = PyUnicode_AsUTF8(object->co_filename);
  const std::string_view name = file != nullptr ? file : "<frozen";
  // Packages below the standard library's folder are no part of it.
  const auto starts = [&](std::string_view prefix) {
    return name.substr(0, prefix.size()) == prefix &&
           name.find("site-packages/", prefix.size()) == std::string_view::npos;
  };
  const bool skip = name.starts_with("<frozen") || name.starts_with("<eval_with_key") ||
                    std::any_of(skipped().begin(), skipped().end(), starts);
  return cache[object] = {skip, name.find("/torch/utils/data/") != std::string_view::npos, starts("<frozen importlib")};
}

// Under the GIL.
Frame intern(std::string text) {
  static auto* const texts = new std::unordered_map<std::string, Frame>();
  auto& line = (*texts)[text];
  if (line == nullptr) {
    line = new std::string(std::move(text));
  }
  return line;
}

Frame line_of(PyFrameObject* frame, PyCodeObject* object) {
  const char* const file = PyUnicode_AsUTF8(object->co_filename);
  const char* const name = PyUnicode_AsUTF8(object->co_name);
  return intern(std::string(file != nullptr ? file : "?") + ":" + std::to_string(PyFrame_GetLineNumber(frame)) +
                " in " + (name != nullptr ? name : "?"));
}

// Calls `visit` with the user's frames of this thread, innermost first, until it returns false.
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
    const auto line = code_of(object).skip ? nullptr : line_of(frame, object);
    Lines::of_thread().add(instruction_of(frame, object), line);
    more = line == nullptr || visit(line);
    Py_DECREF(object);
    PyFrameObject* const back = more ? PyFrame_GetBack(frame) : nullptr;
    Py_DECREF(frame);
    frame = back;
  }
}

// The user's innermost line, where all instructions up to it are known; costs some nanoseconds a frame.
std::optional<Frame> cached_frame() {
  if (!Py_IsInitialized()) {
    return nullptr;
  }
  auto& lines = Lines::of_thread();
  for (auto frame = PythonFrame::top(); frame; frame = frame.back()) {
    const auto line = lines.find(frame.instruction());
    if (!line || *line != nullptr) {
      return line;
    }
  }
  return PythonFrame::readable() ? std::optional<Frame>(nullptr) : std::nullopt;
}

// What a call that is recorded here keeps of its lines.
Frame fresh_frame() {
  const auto lines = depth.load(std::memory_order_relaxed);
  // Where every operator is a graph of its own, the line that records it is the one that runs it.
  if (lines == 1 && !eager()) {
    return user_frame();
  }
  return lines > 1 ? user_frames(lines) : nullptr;
}

// Null where no Python runs.
const void* top_frame() { return Py_IsInitialized() ? PythonFrame::top().address() : nullptr; }

}  // namespace

void set_frame_depth(int lines) { depth.store(lines, std::memory_order_relaxed); }

FrameScope::FrameScope() {
  current_frame = scope_line.first != nullptr && scope_line.first == top_frame() ? scope_line.second : fresh_frame();
}
FrameScope::~FrameScope() { current_frame = nullptr; }

LineScope::LineScope() : outer_(std::exchange(scope_line, {top_frame(), fresh_frame()})) {}
LineScope::~LineScope() { scope_line = outer_; }

Frame recorded_frame() { return current_frame; }

void add_skipped_prefix(std::string prefix) {
  skipped().push_back(std::move(prefix));
  generation.fetch_add(1, std::memory_order_release);
}

Frame user_frame() {
  if (const auto cached = cached_frame()) {
    return *cached;
  }
  Frame user = nullptr;
  walk([&](Frame frame) {
    user = frame;
    return false;
  });
  return user;
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

// A frame that is held keeps what its function refers to, and a tensor that lives over a barrier makes another graph.
// So no Python code may run here, a collection's finalizers included: the thread cannot go on meanwhile.
std::pair<Frame, bool> thread_position(unsigned long thread) {
  const py::gil_scoped_acquire gil;
  const bool collecting = PyGC_Disable() != 0;
  auto* state = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
  while (state != nullptr && state->thread_id != thread) {
    state = PyThreadState_Next(state);
  }
  std::pair<Frame, bool> position{nullptr, false};
  PyFrameObject* frame = state != nullptr ? PyThreadState_GetFrame(state) : nullptr;
  bool imported = false;
  while (frame != nullptr) {
    PyCodeObject* const object = PyFrame_GetCode(frame);
    const auto code = code_of(object);
    if (imported && code.skip && !code.imports) {
      position.first = nullptr;  // a library's import: what that runs is no line of the user's
    }
    imported = code.imports;
    if (position.first == nullptr && !code.skip) {
      position.first = line_of(frame, object);
    }
    position.second |= code.loader;
    Py_DECREF(object);
    PyFrameObject* const back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    frame = back;
  }
  if (collecting) {
    PyGC_Enable();
  }
  return position;
}

}  // namespace torch_xla
