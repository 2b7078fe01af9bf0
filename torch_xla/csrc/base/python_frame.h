// The calling thread's Python frames, read where the interpreter keeps them: without the GIL, which PyTorch's bindings
// have released by the time an operator is recorded. No other thread changes a frame that is running, nor its code.
#pragma once
#include <Python.h>

#if PY_VERSION_HEX < 0x030E0000
#define Py_BUILD_CORE 1
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#endif

namespace torch_xla {

// The instruction that a frame is at, as an address that no living code object shares. Wants the GIL.
inline const void* instruction_of(PyFrameObject* frame, PyCodeObject* code) {
  return reinterpret_cast<const char*>(_PyCode_CODE(code)) + PyFrame_GetLasti(frame);
}

#if PY_VERSION_HEX < 0x030E0000

class PythonFrame {
 public:
  static constexpr bool readable() { return true; }
  static PythonFrame top() {
    auto* const state = PyGILState_GetThisThreadState();
    if (state == nullptr) {
      return PythonFrame(nullptr);
    }
#if PY_VERSION_HEX < 0x030D0000
    return PythonFrame(state->cframe->current_frame);
#else
    return PythonFrame(state->current_frame);
#endif
  }
  explicit operator bool() const { return frame_ != nullptr; }
  PythonFrame back() const { return PythonFrame(frame_->previous); }
  const void* address() const { return frame_; }
  const void* instruction() const {
#if PY_VERSION_HEX < 0x030D0000
    return frame_->prev_instr;
#else
    return frame_->instr_ptr;
#endif
  }

 private:
  // Leaves out what is no frame yet, or stands for a call from C.
  explicit PythonFrame(_PyInterpreterFrame* frame) : frame_(frame) {
    while (frame_ != nullptr && _PyFrame_IsIncomplete(frame_)) {
      frame_ = frame_->previous;
    }
  }

  _PyInterpreterFrame* frame_;
};

#else  // their layout is another, and not one we know

class PythonFrame {
 public:
  static constexpr bool readable() { return false; }
  static PythonFrame top() { return {}; }
  explicit operator bool() const { return false; }
  PythonFrame back() const { return {}; }
  const void* address() const { return nullptr; }
  const void* instruction() const { return nullptr; }
};

#endif

}  // namespace torch_xla
