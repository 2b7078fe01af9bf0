// A graph that was captured: what a thread recorded on a device, as one program that runs at each replay. It takes what
// the storages hold then that it read when it was captured, and gives its results to those that it had written.
#pragma once
#include <memory>
#include <vector>

#include "run/program.h"

namespace torch_xla {

// A thread's capture of a device. Wants the GIL.
class Capture {
 public:
  explicit Capture(c10::DeviceIndex device) : device_(device) {}
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;
  ~Capture() { end(); }
  // Nothing is pending on the device.
  void begin();
  // Storages have what they had at the beginning, since nothing of it ran; those made since have no value. Nothing
  // where it has not begun.
  void end();

 private:
  const c10::DeviceIndex device_;
  bool begun_ = false;
};

class CapturedGraph final {
 public:
  // Of what is captured, before that ends.
  explicit CapturedGraph(const Graph& graph);
  // The program of that graph, once the capture has ended.
  void set_program(const Graph& graph, std::shared_ptr<Program> program);
  // Starts the program; returns its token. Nothing is pending on the device, else it throws StaleGraph, as it does
  // where the memory was written, in a signal handler say, before it started.
  py::object replay();

 private:
  class Replay;
  struct Input {
    StoragePtr storage;
    MetaRef meta;
    NodePtr constant;  // where it is of no storage
  };
  struct Write {
    StoragePtr older_storage;  // one that was there before the capture
    c10::weak_intrusive_ptr<Storage> storage;
    MetaRef meta;
    uint32_t output;
  };
  struct Draw {
    size_t number;  // its seed; the offset is the next
    int64_t offset;
  };

  const c10::DeviceIndex device_;
  std::shared_ptr<Program> program_;
  Vector<NumberSlot> numbers_;
  std::vector<Input> inputs_;  // per input of the program
  std::vector<Write> writes_;
  std::vector<Draw> draws_;
  uint64_t first_offset_ = 0;  // of the numbers that it draws
  uint64_t drawn_ = 0;
};

}  // namespace torch_xla
