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

void Capture::begin() {
  const auto device = device_;
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
      s.commit(s.value, garbage);
    }
    captured_storages(device).push_back(std::move(storage));
  });
  begin_captured(device, next_storage_id());
  suspend_eager(true);
  begun_ = true;
}

void Capture::end() {
  if (!std::exchange(begun_, false)) {
    return;
  }
  const auto device = device_;
  suspend_eager(false);
  const auto first = first_captured_storage(device);
  std::vector<StoragePtr> storages;
  Vector<Value> garbage;
  {
    const RecorderLock lock;
    storages.swap(captured_storages(device));
    for (const auto& storage : storages) {
      if (storage->committed && !(storage->value == storage->committed)) {
        storage->roll_back({}, garbage);
      }
    }
    for_each_storage(device, [&](Storage& s) {
      if (s.id >= first && !s.value.node->leaf()) {
        s.replace(make_lost(s.meta,
                            "[graph] got a tensor that was made while a graph was captured, expected a replay before "
                            "its value is used; call replay()",
                            /*uncomputed=*/true),
                  garbage);
        ++s.generation;
      }
    });
    for_each_remembered(device, Cut::kNow, [&](ViewStep& step) { garbage.push_back(step.forget()); });
    forget_writes(device, node_sequence());
    call_trace_of(device).drop_ends(node_sequence());
    call_trace_of(device).barrier();
    end_captured(device, node_sequence());
  }
  end_captured_draws(device);
}

CapturedGraph::CapturedGraph(const Graph& graph) : device_(graph.device) {
  const auto draws = captured_draws(device_);
  first_offset_ = draws.offset;
  drawn_ = draws.count;
  const auto first = first_captured_storage(device_);
  std::map<std::pair<const Node*, uint32_t>, uint32_t> outputs;
  for (uint32_t i = 0; i < graph.outputs.size(); ++i) {
    outputs.emplace(std::pair(graph.outputs[i].node.get(), graph.outputs[i].index), i);
  }
  std::unordered_map<const Node*, StoragePtr> holders;
  std::vector<StoragePtr> living;
  const RecorderLock lock;
  for (const auto& storage : captured_storages(device_)) {
    if (storage->committed) {
      holders.emplace(storage->committed.node.get(), storage);
    }
  }
  for_each_storage(device_, [&](Storage& s) {
    const auto output = outputs.find({s.value.node.get(), s.value.index});
    const bool uploaded = s.id >= first && s.value.node->leaf();  // by another thread, meanwhile
    auto storage = output != outputs.end() || uploaded ? alive(s) : StoragePtr();
    if (!storage) {
      return;
    }
    if (uploaded) {
      holders.emplace(s.value.node.get(), storage);
    } else {
      writes_.push_back(
          {s.id < first ? storage : StoragePtr(), c10::weak_intrusive_ptr<Storage>(storage), s.meta, output->second});
    }
    living.push_back(std::move(storage));
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

void CapturedGraph::set_program(const Graph& graph, std::shared_ptr<Program> program) {
  program_ = std::move(program);
  numbers_ = graph.numbers;
  draws_.clear();
  for (size_t i = 0; i < numbers_.size(); ++i) {
    if (numbers_[i].position == NumberSlot::kSeed) {
      draws_.push_back({i, numbers_[i + 1].integer - static_cast<int64_t>(first_offset_)});
      ++i;
    }
  }
  std::vector<StoragePtr> living;
  const RecorderLock lock;
  for (const auto& write : writes_) {
    auto storage = write.older_storage ? StoragePtr() : write.storage.lock();
    if (storage && storage->value.node->is(Source::Kind::Lost)) {
      storage->placement = storage->value.node->placement = program_->outputs[write.output].placement;
      living.push_back(std::move(storage));
    }
  }
}

// One replay: what the program takes and where its results go. Of what it found nothing may have changed when the
// program starts, since until then Python code may run, and in it a signal handler that writes or replays too.
class CapturedGraph::Replay final : public Arguments {
 public:
  explicit Replay(const CapturedGraph& graph) : graph_(graph) {
    device = graph.device_;
    numbers = graph.numbers_;
    random_ = random_state(device);
    for (const auto& draw : graph.draws_) {
      numbers[draw.number].integer = static_cast<int64_t>(random_.first);
      numbers[draw.number + 1].integer = static_cast<int64_t>(random_.second) + draw.offset;
    }
    if (!bind()) {
      if (has_pending(device, Cut::kNow)) {
        throw StaleGraph();
      }
      TORCH_CHECK(false, "[graph] got a tensor without a buffer of its own, expected one that is computed and not ",
                  "given away");
    }
  }

  // Inputs that the program writes over although more is left of them than the value that a result replaces: they are
  // constants, or others have them too.
  void copy_shared() {
    Vector<size_t> shared;
    std::vector<PyObject*> buffers;
    {
      const RecorderLock lock;
      for (size_t i = 0; i < leaves.size(); ++i) {
        const auto& storage = graph_.inputs_[i].storage;
        if (!graph_.program_->packing.donated[i]) {
          continue;
        }
        const size_t ours = 2 + (storage && storage->committed && storage->committed.node == leaves[i] ? 1 : 0);
        if (!storage || leaves[i].use_count() != ours + leaves[i]->cuts + bufferless_clones(*leaves[i])) {
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

  void begin() override {
    const bool drawn = graph_.drawn_ != 0 && random_ != random_state(device);
    const RecorderLock lock;
    if (drawn || generations() != generations_) {
      throw StaleGraph();
    }
  }

  void attach(Vector<Result> results) override {
    std::vector<Value> values(results.size());
    const RecorderLock lock;
    for (size_t i = 0; i < written_.size(); ++i) {
      const auto& storage = written_[i];
      if (!storage) {
        continue;
      }
      const auto output = graph_.writes_[i].output;
      auto& value_of_output = values[output];
      auto value = value_of_output ? clone_leaf(value_of_output, {}) : make_leaf(storage->meta, nullptr);
      if (!value_of_output) {
        results[output].give_to(*value.node);
        value_of_output = value;
      }
      storage->commit(std::move(value), garbage_);
      storage->placement = storage->value.node->placement;
      ++storage->generation;
    }
    for (auto& result : results) {
      release_object(result.buffer);  // nobody has it any more
    }
  }

 private:
  // Finds what the program takes; false where a value is not computed.
  bool bind() {
    const RecorderLock lock;
    for (const auto& write : graph_.writes_) {
      check_size(written_.emplace_back(write.storage.lock()), write.meta);
    }
    generations_ = generations();
    for (size_t i = 0; i < graph_.inputs_.size(); ++i) {
      const auto& [storage, meta, constant] = graph_.inputs_[i];
      if (storage) {
        check_size(storage, meta);
        resolve(storage->value);
        check_value(*storage->value.node, device);
        if (!storage->value.node->leaf() || storage->value.node->donor) {
          return false;
        }
      }
      auto leaf = storage ? storage->value.node : constant;
      if (const auto* const original = original_of(*leaf);
          original != nullptr && !graph_.program_->packing.donated[i]) {
        leaf = NodePtr(*original);  // of a copy that is only read
      }
      leaves.push_back(std::move(leaf));
      TORCH_CHECK(((leaves[i]->is(Source::Kind::NumberFill) && leaves[i]->placement == kUnspecified) ||
                   graph_.program_->inputs[i] == Program::Type{leaves[i]->meta(0).value, leaves[i]->placement}),
                  "[graph] got a tensor that was moved to other devices since the capture, expected it where it was; ",
                  "capture again");
    }
    return true;
  }

  Vector<uint64_t> generations() const {
    Vector<uint64_t> all;
    all.reserve(graph_.inputs_.size() + written_.size());
    for (const auto& input : graph_.inputs_) {
      all.push_back(input.storage ? input.storage->generation : 0);
    }
    for (const auto& storage : written_) {
      all.push_back(storage ? storage->generation : 0);
    }
    return all;
  }

  const CapturedGraph& graph_;
  std::pair<uint64_t, uint64_t> random_;  // the seed and the offset that it found
  std::vector<StoragePtr> written_;       // per write, where that lives
  Vector<uint64_t> generations_;          // of the storages of inputs and writes
  Vector<Value> garbage_;                 // to be destroyed without the lock
};

py::object CapturedGraph::replay() {
  Replay replay(*this);
  replay.copy_shared();
  auto token = execute(replay, *program_);
  if (drawn_ != 0) {
    const auto [seed, offset] = random_state(device_);
    set_random_state(device_, seed, offset + drawn_);
  }
  return token;
}

}  // namespace torch_xla
