#include "run/captured.h"

#include <array>
#include <map>
#include <unordered_map>

#include "base/python_hooks.h"
#include "device/capture.h"
#include "device/random.h"
#include "loops/call_trace.h"
#include "tensor/lazy_clone.h"
#include "tensor/placeholder.h"
#include "tensor/write_log.h"

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

// The storages of a device when its capture began: what is read of one that nobody wants any more is memory all the
// same.
std::vector<StoragePtr>& captured_storages(c10::DeviceIndex device) {
  static auto* const all = new std::array<std::vector<StoragePtr>, kMaxDevices>;
  return all->at(device);
}

void check_size(const StoragePtr& storage, const MetaRef& meta) {
  TORCH_CHECK(!storage || (storage->meta->layout == meta->layout && storage->meta->offset == meta->offset),
              "[graph] got a tensor that was resized since the capture, expected the memory that was captured; ",
              "capture again");
}

}  // namespace

void begin_capture(c10::DeviceIndex device) {
  TORCH_CHECK(!captures_here(), "[graph] got a capture inside a capture, expected one at a time; end the first one");
  check_captured_here(device);
  Vector<Value> garbage;
  begin_captured_draws(device);
  const RecorderLock lock;
  for_each_storage(device, [&](Storage& s) {
    auto storage = alive(s);
    if (!storage) {
      return;
    }
    resolve(s.value);
    if (s.value.node->leaf()) {
      garbage.push_back(std::exchange(s.committed, s.value));
      garbage.push_back(std::exchange(s.initial_fill, {}));
    }
    captured_storages(device).push_back(std::move(storage));
  });
  begin_captured(device, next_storage_id());
}

void end_capture(c10::DeviceIndex device) {
  const auto first = first_captured_storage(device);
  std::vector<StoragePtr> storages;
  Vector<Value> garbage;
  {
    const RecorderLock lock;
    storages.swap(captured_storages(device));
    for (const auto& storage : storages) {
      if (storage->committed && !(storage->value == storage->committed)) {
        garbage.push_back(std::exchange(storage->value, storage->committed));
        ++storage->generation;
      }
    }
    for_each_storage(device, [&](Storage& s) {
      if (s.pending_commit) {
        garbage.push_back(std::move(s.pending_commit));
      }
      if (s.id >= first && !s.value.node->leaf()) {
        garbage.push_back(std::exchange(s.value, make_uncomputed(s.meta)));
        garbage.push_back(std::exchange(s.initial_fill, {}));
        garbage.push_back(std::exchange(s.committed, {}));
        ++s.generation;
      }
    });
    forget_views(device, Cut::kNow, garbage);
    forget_writes(device, node_sequence());
    call_trace_of(device).drop_ends(node_sequence());
    call_trace_of(device).barrier();
    end_captured(device);
  }
  end_captured_draws(device);
}

CapturedGraph::CapturedGraph(const Graph& graph) {
  device = graph.device;
  numbers = graph.numbers;
  const auto [seed, first_offset, count] = captured_draws(device);
  drawn_ = count;
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i].position == NumberSlot::kSeed) {
      draws_.push_back({i, numbers[i + 1].integer - static_cast<int64_t>(first_offset)});
      ++i;
    }
  }
  const auto first = first_captured_storage(device);
  std::map<std::pair<const Node*, uint32_t>, uint32_t> outputs;
  for (uint32_t i = 0; i < graph.outputs.size(); ++i) {
    outputs.emplace(std::pair(graph.outputs[i].node.get(), graph.outputs[i].index), i);
  }
  std::unordered_map<const Node*, StoragePtr> holders;
  std::vector<StoragePtr> living;
  const RecorderLock lock;
  for (const auto& storage : captured_storages(device)) {
    if (storage->committed) {
      holders.emplace(storage->committed.node.get(), storage);
    }
  }
  for_each_storage(device, [&](Storage& s) {
    const auto output = outputs.find({s.value.node.get(), s.value.index});
    auto storage = output != outputs.end() ? alive(s) : StoragePtr();
    if (storage) {
      writes_.push_back(
          {s.id < first ? storage : StoragePtr(), c10::weak_intrusive_ptr<Storage>(storage), s.meta, output->second});
      living.push_back(std::move(storage));
    }
  });
  for (const auto& leaf : graph.leaves) {
    const auto holder = holders.find(leaf.get());
    if (holder != holders.end()) {
      inputs_.push_back({holder->second, holder->second->meta, {}});
    } else {
      inputs_.push_back({{}, {}, leaf});
    }
  }
}

void CapturedGraph::set_program(std::shared_ptr<Program> program) {
  program_ = std::move(program);
  std::vector<StoragePtr> living;
  const RecorderLock lock;
  for (const auto& write : writes_) {
    auto storage = write.older_storage ? StoragePtr() : write.storage.lock();
    if (storage && storage->value.node->error != nullptr) {
      storage->placement = storage->value.node->placement = program_->outputs[write.output].placement;
      living.push_back(std::move(storage));
    }
  }
}

// Finds what the program takes.
void CapturedGraph::bind() {
  const auto [seed, offset] = random_state(device);
  for (const auto& draw : draws_) {
    numbers[draw.number].integer = static_cast<int64_t>(seed);
    numbers[draw.number + 1].integer = static_cast<int64_t>(offset) + draw.offset;
  }
  std::vector<StoragePtr> living;
  const RecorderLock lock;
  for (const auto& write : writes_) {
    check_size(living.emplace_back(write.storage.lock()), write.meta);
  }
  for (size_t i = 0; i < inputs_.size(); ++i) {
    const auto& [storage, meta, constant] = inputs_[i];
    if (storage) {
      check_size(storage, meta);
      resolve(storage->value);
      check_value(*storage->value.node, device);
      TORCH_CHECK(storage->value.node->leaf() && !storage->value.node->donor,
                  "[graph] got a tensor without a buffer of its own, expected one that is computed and not given away");
    }
    auto leaf = storage ? storage->value.node : constant;
    if (const auto* const original = original_of(*leaf); original != nullptr && !program_->packing.donated[i]) {
      leaf = NodePtr(*original);  // of a copy that is only read
    }
    leaves.push_back(std::move(leaf));
    TORCH_CHECK((program_->inputs[i] == Program::Type{leaves[i]->meta(0).value, leaves[i]->placement}),
                "[graph] got a tensor that was moved to other devices since the capture, expected it where it was; ",
                "capture again");
  }
}

// Inputs that the program writes over although more is left of them than the value that a result replaces: they are
// constants, or others have them too.
void CapturedGraph::copy_shared() {
  Vector<size_t> shared;
  std::vector<PyObject*> buffers;
  {
    const RecorderLock lock;
    for (size_t i = 0; i < leaves.size(); ++i) {
      const auto& storage = inputs_[i].storage;
      if (!program_->packing.donated[i]) {
        continue;
      }
      const size_t ours = 2 + (storage && storage->committed && storage->committed.node == leaves[i] ? 1 : 0);
      if (!storage || leaves[i].use_count() != ours + bufferless_clones(*leaves[i])) {
        shared.push_back(i);
      }
    }
  }
  for (const auto i : shared) {
    fetch_clones(clones_to_fetch({leaves[i]}, {false}));
    fetch_buffer(leaves[i]);
    buffers.push_back(leaves[i]->buffer);
  }
  const auto copies = buffers.empty() ? buffers : copy(buffers);
  const RecorderLock lock;
  for (size_t k = 0; k < shared.size(); ++k) {
    auto& leaf = leaves[shared[k]];
    auto leaf_copy = make_leaf({leaf->outs, 0}, copies[k]);
    leaf_copy.node->placement = leaf->placement;
    garbage_.push_back({std::exchange(leaf, std::move(leaf_copy.node)), 0});
  }
}

py::object CapturedGraph::replay() {
  py::object token;
  try {
    bind();
    copy_shared();
    token = execute(*this, *program_);
  } catch (...) {
    forget();
    throw;
  }
  forget();
  if (drawn_ != 0) {
    const auto [seed, offset] = random_state(device);
    set_random_state(device, seed, offset + drawn_);
  }
  return token;
}

void CapturedGraph::attach(Vector<Result> results) {
  std::vector<Value> values(results.size());
  std::vector<StoragePtr> living;
  const RecorderLock lock;
  for (const auto& write : writes_) {
    auto storage = write.storage.lock();
    if (!storage) {
      continue;
    }
    const auto output = write.output;
    auto& value_of_output = values[output];
    auto value = value_of_output ? clone_leaf(value_of_output, {}) : make_leaf(storage->meta, nullptr);
    if (!value_of_output) {
      results[output].give_to(*value.node);
      value_of_output = value;
    }
    garbage_.push_back(std::exchange(storage->initial_fill, {}));
    garbage_.push_back(std::exchange(storage->committed, value));
    garbage_.push_back(std::exchange(storage->value, std::move(value)));
    storage->placement = storage->value.node->placement;
    ++storage->generation;
    living.push_back(std::move(storage));
  }
  for (auto& result : results) {
    release_object(result.buffer);  // nobody has it any more
  }
}

void CapturedGraph::forget() {
  leaves.clear();
  garbage_.clear();
}

}  // namespace torch_xla
