// What a step that is recorded reads and leaves behind, told by storages: enough to run it again without recording it.
#pragma once
#include <ATen/core/Tensor.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "cut/graph.h"
#include "tensor/watch.h"

namespace torch_xla {

class Recording {
 public:
  // Begins: nothing may be pending on the device.
  explicit Recording(c10::DeviceIndex device);
  ~Recording() { stop(); }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  // Ends noting what the step touches.
  void stop();
  // Takes notice of the graph that the step became and that is about to run.
  void see(const Graph& graph);

  // A storage that has another value after the step, or is new.
  struct Change {
    uint64_t storage = 0;
    bool existed = false;
    int32_t output = -1;  // of the graph, which is its value; else
    uint64_t from = 0;    // the storage whose value before the step it has, or 0
    Frame frame = nullptr;
  };
  struct Number {
    NumberSlot slot;
    const std::string* op;
    Frame frame;
  };
  struct Known {
    c10::weak_intrusive_ptr<Storage> storage;
    MetaRef meta;
  };

  // By its id: one that existed before the step, or changed in it.
  const Known& storage(uint64_t id) const;
  // Whether there is one that it knows.
  bool lives(uint64_t id) const;
  // Tensors the step computed with that are still there, and whether it wrote to them.
  std::vector<std::pair<at::Tensor, bool>> touched() const;

  const c10::DeviceIndex device;
  Hash whole_key;               // the same wherever its buffers are, which differs between a loop's first steps
  std::vector<uint64_t> reads;  // per leaf: the storage whose value before the step it was, or 0
  std::vector<int32_t> copied;  // per leaf: the upload that made it, or -1
  std::vector<Number> numbers;
  std::vector<Change> changes;
  std::vector<uint64_t> gone;  // storages that existed before the step and do not any more
  bool relaid = false;         // a storage got another shape
  Watch watch;

 private:
  uint64_t storage_of(const Node& leaf) const;

  struct Held {
    uint64_t id;
    c10::weak_intrusive_ptr<Node> leaf;
    uint64_t layouts;
  };
  std::unordered_map<uint64_t, Known> storages_;
  std::unordered_map<const Storage*, Held> before_;
  std::unordered_map<const Node*, uint64_t> by_leaf_;
};

}  // namespace torch_xla
