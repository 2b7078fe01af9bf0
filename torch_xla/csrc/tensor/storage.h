// The alias model. A Storage holds the current value shared by all aliases of a tensor; a view is a path of view
// operators from it. A write through a view writes back along the path; a view that is behind replays it.
#pragma once
#include <c10/core/StorageImpl.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <vector>

#include "ir/node.h"

namespace torch_xla {

constexpr size_t kMaxDevices = 127;  // PyTorch counts them in eight bits, with a sign

// One lock for all recorder state. Never taken while waiting for the GIL, so it may be taken with the GIL held.
class RecorderLock {
 public:
  RecorderLock();
  ~RecorderLock();
  RecorderLock(const RecorderLock&) = delete;
  RecorderLock& operator=(const RecorderLock&) = delete;

 private:
  NoPython no_python_;
};

// A value by the sequence of its node, without keeping it.
struct ValueId {
  uint64_t node = 0;
  uint32_t index = 0;
};

// It is PyTorch's storage at once, so that all who compare storages, sizes or addresses see aliases as they are. No one
// can read at its address: that is a number no other living storage has, and null for no bytes, as on CPU.
struct Storage final : c10::StorageImpl, Pooled<Storage> {
  Storage(Value value, MetaRef meta, c10::DeviceIndex device);
  ~Storage() override { release(); }
  // A storage that is gone may wait for its weak references, but its value must not.
  void release_resources() override;
  // Frees the value at 0 bytes. Growing keeps what there is, in memory order, and adds zeros; a storage that holds
  // nothing takes the shape `like`, where it is given.
  void resize(size_t bytes, const MetaRef& like, Vector<Value>& garbage);

  const uint64_t id;          // no other storage ever has it
  const ValueId first_value;  // its first value
  Value value;
  MetaRef meta;  // of the base tensor
  c10::DeviceIndex index;
  uint64_t generation = 0;  // counts writes; a view made at an older one replays its path
  uint64_t layouts = 0;     // counts changes of `meta`; an alias made at an older one finds another path
  Value committed;          // the leaf it had when results last came: its value after a failure
  Value pending_commit;     // the value it had at the barrier that runs; then it is committed
  Value initial_fill;       // the fill it was created with, until a cut makes it a leaf
  uint32_t placement;       // where its values are to be: as the first one, or as was asked for since

  // What writes values that nobody records. Wants the recorder's lock; old values go to `garbage`.
  // A leaf is its value now, and what a failure gives it back.
  void commit(Value leaf, Vector<Value>& garbage);
  // The value of the latest barrier is the committed one, once it is computed.
  void settle(Vector<Value>& garbage);
  // What it was made with becomes a leaf: the first step of an optimizer, whose state it is, then has the same graph as
  // the second.
  void commit_fill();
  // It has the value of the latest barrier again, or `otherwise` where there is none.
  void roll_back(Value otherwise, Vector<Value>& garbage);
  // It has this value and none to go back to.
  void replace(Value v, Vector<Value>& garbage);

  Storage* previous = nullptr;  // the list of living storages of the device
  Storage* next = nullptr;

 private:
  Storage(uintptr_t address, Value&& value, MetaRef&& meta, c10::DeviceIndex device);
  void release();
  bool listed_ = true;
};
using StoragePtr = c10::intrusive_ptr<Storage>;
// Storages that are made from now on have this id or larger ones.
uint64_t next_storage_id();

// Calls `visit` for every living storage of a device, oldest first. The caller holds the recorder's lock.
template <class Visit>
void for_each_storage(c10::DeviceIndex device, Visit visit);
// Whether `test` holds for one of them; the latest are asked first.
template <class Test>
bool any_storage(c10::DeviceIndex device, Test test);

// One view operator of a path, as a persistent list so that a view of a view costs one allocation. It remembers its
// value until the storage is written or the next cut: a view that kept its value over a barrier would keep the whole
// graph behind it, and carry it into the next one.
struct ViewStep final : c10::intrusive_ptr_target {
  ~ViewStep() override;
  void remember(Value v, const Storage& storage);
  // Gives what it remembered, to be destroyed after the lock is gone; within `for_each_remembered`.
  Value forget();

  Value value;  // valid at `generation`
  uint64_t generation = 0;
  // Whose list of remembered values it is in; -1 for none. A step is let go of without the recorder's lock, perhaps
  // while a cut empties the list: the -1 is the last that the cut writes to it.
  std::atomic<c10::DeviceIndex> device = -1;
  ViewStep* previous = nullptr;
  ViewStep* next = nullptr;

  c10::intrusive_ptr<ViewStep> parent;
  OpInfo* op = nullptr;
  Args args;  // with `Input` in place of the tensor
  MetaRef in;
  MetaSetPtr out;                // of its one result
  bool overlaps_itself = false;  // some element of the base appears more than once
};
using ViewPath = c10::intrusive_ptr<ViewStep>;

// Calls `visit` for each view of a device that remembers a value of before a node sequence.
void for_each_remembered(c10::DeviceIndex device, uint64_t until, const std::function<void(ViewStep&)>& visit);

// What a tensor is: a storage and a path to it. All functions want the recorder's lock.
struct Alias {
  StoragePtr storage;
  ViewPath path;  // null for the base
  MetaRef meta;
  uint64_t layout = 0;  // of the storage, when the path was made

  // The tensor's current value, replaying the path where the storage was written since.
  const Value& current();
  // Makes `v` the tensor's value, and its storage's through the path.
  void write(Value v);
  // The view that `op` makes of this tensor; `node` is the call, which gives its value.
  Alias view(OpInfo& op, Args args, const MetaSetPtr& out, const NodePtr& node) const;
  // A view of the storage's memory, as torch.as_strided addresses it; a conjugate's is one too.
  Alias as_strided(const MetaRef& meta) const;

 private:
  void find_path();
};

Alias memory_alias(StoragePtr storage, const MetaRef& meta);
// Bytes of memory that a tensor reaches, from the start of its storage.
size_t extent(const Meta& meta);
Alias new_alias(Value value, MetaRef meta, c10::DeviceIndex device);

// A reference to a storage of the list; null where it is on its way out: who deletes it has counted the weak ones
// already, so that one more would be to memory that is gone. To be let go of without a lock.
StoragePtr alive(Storage& storage);

// Access for `for_each_storage`.
std::mutex& registry_mutex();
Storage* registry_head(c10::DeviceIndex device);
Storage* registry_tail(c10::DeviceIndex device);

template <class Visit>
void for_each_storage(c10::DeviceIndex device, Visit visit) {
  const std::lock_guard<std::mutex> lock(registry_mutex());
  for (auto* s = registry_head(device); s != nullptr; s = s->next) {
    visit(*s);
  }
}

template <class Test>
bool any_storage(c10::DeviceIndex device, Test test) {
  const std::lock_guard<std::mutex> lock(registry_mutex());
  auto* s = registry_tail(device);
  while (s != nullptr && !test(*s)) {
    s = s->previous;
  }
  return s != nullptr;
}

}  // namespace torch_xla
