#include "cut/recording.h"

#include <map>

#include "ir/op_info.h"
#include "tensor/lazy_clone.h"

namespace torch_xla {

namespace {

// A reference to a storage of the list; null where it is on its way out: who deletes it has counted the weak ones
// already, so that one more would be to memory that is gone. To be let go of without a lock.
StoragePtr alive(Storage& storage) {
  auto unowned = c10::weak_intrusive_ptr<Storage>::reclaim(&storage);
  auto reference = unowned.lock();
  unowned.release();
  return reference;
}

// Gives every clone a buffer: a clone of a clone is one of the original, which is another tensor's.
void settle_clones(c10::DeviceIndex device) {
  Vector<NodePtr> leaves;
  {
    const RecorderLock lock;
    for_each_storage(device, [&](Storage& s) {
      resolve(s.value);
      if (s.value.node->leaf()) {
        leaves.push_back(s.value.node);
      }
    });
  }
  fetch_clones(clones_to_fetch(leaves, Vector<bool>(leaves.size(), false)));
}

}  // namespace

Recording::Recording(c10::DeviceIndex d) : device(d) {
  settle_clones(device);
  std::vector<StoragePtr> living;
  const RecorderLock lock;
  TORCH_CHECK(watching == nullptr, "[replay] got a step inside another that is recorded, expected one at a time");
  for_each_storage(device, [&](Storage& s) {
    auto storage = alive(s);
    if (!storage) {
      return;
    }
    resolve(s.value);
    storages_.emplace(s.id, Known{c10::weak_intrusive_ptr<Storage>(storage), s.meta});
    living.push_back(std::move(storage));
    before_.emplace(&s, Held{s.id, c10::weak_intrusive_ptr<Node>(s.value.node), s.layouts});
    by_leaf_.emplace(s.value.node.get(), s.id);
  });
  watching = &watch;
}

void Recording::stop() {
  const RecorderLock lock;
  if (watching == &watch) {
    watching = nullptr;
  }
}

uint64_t Recording::storage_of(const Node& leaf) const {
  const auto found = by_leaf_.find(&leaf);
  if (found != by_leaf_.end()) {
    return found->second;
  }
  const auto* const original = leaf.buffer == nullptr && leaf.source.defined() ? leaf.source->original() : nullptr;
  return original != nullptr ? storage_of(**original) : 0;
}

void Recording::see(const Graph& graph) {
  std::vector<StoragePtr> living;
  const RecorderLock lock;
  whole_key = graph.whole_key;
  reads.clear();
  copied.clear();
  numbers.clear();
  changes.clear();
  gone.clear();
  std::unordered_map<const Node*, int32_t> made;
  for (size_t i = 0; i < watch.uploads.size(); ++i) {
    made.emplace(watch.uploads[i].leaf._unsafe_get_target(), static_cast<int32_t>(i));
  }
  for (const auto& leaf : graph.leaves) {
    reads.push_back(storage_of(*leaf));
    const auto upload = made.find(leaf.get());
    copied.push_back(upload != made.end() ? upload->second : -1);
  }
  for (const auto& slot : graph.numbers) {
    const auto& node = *graph.nodes[slot.node];
    numbers.push_back({slot, &node.op->name, node.frame});
  }
  std::map<std::pair<const Node*, uint32_t>, int32_t> outputs;
  for (size_t i = 0; i < graph.outputs.size(); ++i) {
    outputs.emplace(std::pair(graph.outputs[i].node.get(), graph.outputs[i].index), static_cast<int32_t>(i));
  }
  for (const auto& [unused, held] : before_) {
    if (storages_.at(held.id).storage.expired()) {
      gone.push_back(held.id);
    }
  }
  for_each_storage(device, [&](Storage& s) {
    auto storage = alive(s);
    if (!storage) {
      return;
    }
    living.push_back(storage);
    resolve(s.value);
    const auto& node = *s.value.node;
    const auto held = before_.find(&s);
    Change change{s.id, held != before_.end(), -1, 0, node.frame};
    relaid = relaid || (change.existed && held->second.layouts != s.layouts);
    if (change.existed && held->second.leaf._unsafe_get_target() == &node) {
      return;
    }
    if (node.leaf()) {
      change.from = storage_of(node);
    } else {
      const auto output = outputs.find({&node, s.value.index});
      if (output == outputs.end()) {
        return;  // pending, and no part of this graph
      }
      change.output = output->second;
    }
    storages_.emplace(s.id, Known{c10::weak_intrusive_ptr<Storage>(storage), s.meta});
    changes.push_back(change);
  });
}

const Recording::Known& Recording::storage(uint64_t id) const {
  const auto found = storages_.find(id);
  TORCH_CHECK(found != storages_.end(), "[replay] got storage ", id, ", expected one that the step knows");
  return found->second;
}

bool Recording::lives(uint64_t id) const {
  const auto found = storages_.find(id);
  return found != storages_.end() && !found->second.storage.expired();
}

std::vector<std::pair<at::Tensor, bool>> Recording::touched() const {
  std::vector<std::pair<at::Tensor, bool>> found;
  for (const auto& [unused, touched] : watch.touched) {
    if (auto impl = touched.tensor.lock()) {
      found.emplace_back(at::Tensor(std::move(impl)), touched.version.current_version() != touched.before);
    }
  }
  return found;
}

}  // namespace torch_xla
