// The alias model. A Storage holds the current value shared by all aliases of a tensor; a view is a path of view
// operators from it. A write through a view writes back along the path; a view that is behind replays it.
#pragma once
#include <mutex>
#include <vector>

#include "ir.h"

namespace torch_xla {

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

struct Storage final : c10::intrusive_ptr_target {
  Storage(Value value, MetaRef meta, c10::DeviceIndex device);
  ~Storage() override;

  const uint64_t id;
  Value value;
  MetaRef meta;  // of the base tensor
  c10::DeviceIndex device;
  uint64_t generation = 0;  // counts writes; a view made at an older one replays its path
  Value synced;             // the leaf it had after the last barrier
  Value origin;             // the fill it was created with, until the first barrier

  Storage* previous = nullptr;  // the list of living storages of the device
  Storage* next = nullptr;
};
using StoragePtr = c10::intrusive_ptr<Storage>;

// Calls `visit` for every living storage of a device, oldest first. The caller holds the recorder's lock.
template <class Visit>
void for_each_storage(c10::DeviceIndex device, Visit visit);

// One view operator of a path, as a persistent list so that a view of a view costs one allocation. It remembers its
// value until the storage is written or the next cut: a view that kept its value over a barrier would keep the whole
// graph behind it, and carry it into the next one.
struct ViewStep final : c10::intrusive_ptr_target {
  ~ViewStep() override;
  void remember(Value v, const Storage& storage);

  Value value;  // valid at `generation`
  uint64_t generation = 0;
  c10::DeviceIndex device = -1;  // whose list of remembered values it is in; -1 for none
  ViewStep* previous = nullptr;
  ViewStep* next = nullptr;

  c10::intrusive_ptr<ViewStep> parent;
  OpInfo* op = nullptr;
  Args args;         // with `Input` in place of the tensor
  uint32_t out = 0;  // which result, for operators with several
  MetaRef in;
  MetaSetPtr outs;
  bool repeats = false;  // some element of the base appears more than once
};
using ViewPath = c10::intrusive_ptr<ViewStep>;

// Takes back all values that views of a device remember; `garbage` is to be destroyed after the lock is gone.
void forget_views(c10::DeviceIndex device, std::vector<Value>& garbage);

// What a tensor is: a storage and a path to it. All functions want the recorder's lock.
struct Alias {
  StoragePtr storage;
  ViewPath path;  // null for the base
  MetaRef meta;

  // The tensor's current value, replaying the path where the storage was written since.
  const Value& current();
  // Makes `v` the tensor's value, and its storage's through the path.
  void write(Value v);
  // The view that `op` makes of this tensor; `node` is the call, which gives its value.
  Alias view(OpInfo& op, Args args, const MetaSetPtr& outs, uint32_t out, const NodePtr& node) const;
  // A view of the storage's memory, as torch.as_strided addresses it.
  Alias as_strided(const MetaRef& meta);
};

Alias new_alias(Value value, MetaRef meta, c10::DeviceIndex device);

// Access for `for_each_storage`.
std::mutex& registry_mutex();
Storage* registry_head(c10::DeviceIndex device);

template <class Visit>
void for_each_storage(c10::DeviceIndex device, Visit visit) {
  const std::lock_guard<std::mutex> lock(registry_mutex());
  for (auto* s = registry_head(device); s != nullptr; s = s->next) {
    visit(*s);
  }
}

}  // namespace torch_xla
