// A graph that was captured: what a thread recorded on a device, as one program that runs at each replay. It takes what
// the storages hold then that it read when it was captured, and gives its results to those that it had written.
#pragma once
#include <memory>
#include <vector>

#include "run/program.h"

namespace torch_xla {

// Begins: nothing is pending on the device.
void begin_capture(c10::DeviceIndex device);
// Ends. Storages have what they had at the beginning, since nothing of it ran; those made since have no value.
void end_capture(c10::DeviceIndex device);

class CapturedGraph final : public Arguments {
 public:
  // Of what is captured, before that ends.
  explicit CapturedGraph(const Graph& graph);
  // The program of that graph, once the capture has ended.
  void set_program(std::shared_ptr<Program> program);
  // Starts the program; returns its token. Nothing is pending on the device.
  py::object replay();
  void attach(Vector<Result> results) override;

 private:
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
  void bind();
  void copy_shared();
  void forget();

  std::shared_ptr<Program> program_;
  std::vector<Input> inputs_;  // per input of the program
  std::vector<Write> writes_;
  std::vector<Draw> draws_;
  uint64_t drawn_ = 0;
  Vector<Value> garbage_;  // of a replay, to be destroyed without the lock
};

}  // namespace torch_xla
