#include "tensor/storage.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <array>
#include <atomic>

#include "base/fork.h"
#include "device/capture.h"
#include "device/device.h"
#include "ir/op_info.h"
#include "tensor/placeholder.h"
#include "tensor/placement.h"
#include "tensor/source.h"
#include "tensor/view_path.h"
#include "tensor/write_log.h"

namespace torch_xla {

namespace {

struct StorageLists {
  ForkSafe<std::mutex, LockOrder::Storages> mutex;
  std::array<Storage*, kMaxDevices> heads{};
  std::array<Storage*, kMaxDevices> tails{};
  std::array<ViewStep*, kMaxDevices> views{};  // those that remember a value
};
StorageLists& storage_lists() {
  static auto* const r = new StorageLists();
  return *r;
}

std::mutex& recorder_mutex() {
  static auto* const mutex = new ForkSafe<std::mutex, LockOrder::Recorder>();
  return *mutex;
}

}  // namespace

RecorderLock::RecorderLock() { recorder_mutex().lock(); }
RecorderLock::~RecorderLock() { recorder_mutex().unlock(); }

std::mutex& registry_mutex() { return storage_lists().mutex; }
Storage* registry_head(c10::DeviceIndex device) { return storage_lists().heads[device]; }
Storage* registry_tail(c10::DeviceIndex device) { return storage_lists().tails[device]; }

namespace {

// Addresses that no process has, so that reading at one fails at once. Storages without bytes take one too, as their
// id.
std::atomic<uintptr_t> next_address{uintptr_t{1} << 56};
uintptr_t new_address(int64_t bytes) {
  constexpr uintptr_t kAlignment = 64;
  return next_address.fetch_add((static_cast<uintptr_t>(bytes) / kAlignment + 1) * kAlignment,
                                std::memory_order_relaxed);
}

// What PyTorch asks for a storage like this one, such as `storage.new()`: one without bytes.
struct NoMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    TORCH_CHECK(bytes == 0, "[storage] got ", bytes, " bytes for a storage on xla by itself, expected none; make a ",
                "tensor, and take its untyped_storage()");
    return {nullptr, c10::Device(c10::DeviceType::XLA, current_device())};
  }
  void copy_data(void* /*to*/, const void* /*from*/, size_t /*bytes*/) const override {}
};

c10::Allocator* no_memory() {
  static auto* const allocator = new NoMemory();
  return allocator;
}

c10::DataPtr data_at(uintptr_t address, int64_t bytes, c10::DeviceIndex device) {
  auto* const data = bytes == 0 ? nullptr : reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
  return {data, c10::Device(c10::DeviceType::XLA, device)};
}

}  // namespace

uint64_t next_storage_id() { return next_address.load(std::memory_order_relaxed); }

Storage::Storage(Value v, MetaRef m, c10::DeviceIndex d)
    : Storage(new_address(m->bytes), std::move(v), std::move(m), d) {}

Storage::Storage(uintptr_t address, Value&& v, MetaRef&& m, c10::DeviceIndex d)
    : StorageImpl(use_byte_size_t(), m->bytes, data_at(address, m->bytes, d), no_memory(), false),
      id(address),
      first_value{v.node->sequence, v.index},
      value(std::move(v)),
      meta(std::move(m)),
      index(d),
      committed(value.node->leaf() ? value : Value()),  // so that the first step gives away what later ones do
      placement(spans_mesh() && (!value.node->leaf() || value.node->is(Source::Kind::NumberFill))
                    ? kUnspecified
                    : value.node->placement) {
  TORCH_CHECK(static_cast<size_t>(d) < kMaxDevices, "[device] xla:", static_cast<int>(d), " is out of range");
  auto& r = storage_lists();
  const std::lock_guard<std::mutex> lock(r.mutex);
  previous = r.tails[index];
  (previous != nullptr ? previous->next : r.heads[index]) = this;
  r.tails[index] = this;
}

void Storage::release() {
  if (!std::exchange(listed_, false)) {
    return;
  }
  auto& r = storage_lists();
  const std::lock_guard<std::mutex> lock(r.mutex);
  (previous != nullptr ? previous->next : r.heads[index]) = next;
  (next != nullptr ? next->previous : r.tails[index]) = previous;
}

void Storage::release_resources() {
  release();
  value = committed = pending_commit = initial_fill = {};
  StorageImpl::release_resources();
}

void Storage::replace(Value v, Vector<Value>& garbage) {
  for (auto* old : {&value, &committed, &pending_commit, &initial_fill}) {
    if (*old) {
      garbage.push_back(std::exchange(*old, {}));
    }
  }
  value = std::move(v);
}

void Storage::commit(Value leaf, Vector<Value>& garbage) {
  replace(std::move(leaf), garbage);
  committed = value;
  if (placement == kUnspecified) {
    placement = value.node->placement;
  }
}

void Storage::settle(Vector<Value>& garbage) {
  if (pending_commit) {
    resolve(pending_commit);
    if (pending_commit.node->leaf()) {
      garbage.push_back(std::exchange(committed, std::exchange(pending_commit, {})));
    }
  }
}

void Storage::commit_fill() {
  resolve(initial_fill);
  auto& call = *initial_fill.node;
  committed = std::exchange(initial_fill, {});
  if (!call.leaf()) {
    Vector<Value> none;  // it has no inputs
    auto& leaf = call.replace(0, none);
    leaf.source = c10::make_intrusive<NumberFill>(call.args[1].value, index);
    leaf.placement = placement;
    resolve(committed);
  }
}

void Storage::roll_back(Value otherwise, Vector<Value>& garbage) {
  const auto& saved = pending_commit ? pending_commit : committed ? committed : otherwise;
  garbage.push_back(std::exchange(value, saved));
  ++generation;
}

void Storage::resize(size_t bytes, const MetaRef& like, Vector<Value>& garbage) {
  if (bytes == nbytes()) {
    return;
  }
  TORCH_CHECK(!is_captured(index) || id >= first_captured_storage(index),
              "[graph] got a tensor that is resized while a ",
              "graph is captured, expected those that were there before to keep their memory; resize it before");
  const bool holds = !value.node->is(Source::Kind::Lost) && meta->numel() != 0;
  auto resized = value;
  if (bytes == 0) {
    resized = make_lost(
        meta,
        "[storage] the tensor's memory was freed by resize_(0) of its storage; give the storage its size back first");
  } else if (bytes > static_cast<size_t>(meta->bytes) || (!holds && like.set.defined())) {
    const auto item = c10::elementSize(meta->dtype);
    const auto count = static_cast<int64_t>((bytes + item - 1) / item);
    const bool fits = !holds && like.set.defined() && like->offset == 0 && static_cast<size_t>(like->bytes) == bytes;
    auto grown = fits ? like : contiguous_meta({count}, meta->dtype);
    resized = holds ? padded(value, meta, grown) : make_fill(grown, unwritten(meta->dtype));
    meta = std::move(grown);
    ++layouts;
  } else if (!holds) {
    resized = make_fill(meta, unwritten(meta->dtype));
  }
  replace(std::move(resized), garbage);
  ++generation;
  initial_fill = holds || bytes == 0 ? Value() : value;
  const auto size = static_cast<int64_t>(bytes);
  set_data_ptr_noswap(data_at(new_address(size), size, index));
  set_nbytes(bytes);
}

StoragePtr alive(Storage& storage) {
  auto unowned = c10::weak_intrusive_ptr<Storage>::reclaim(&storage);
  auto reference = unowned.lock();
  unowned.release();
  return reference;
}

size_t extent(const Meta& meta) {
  return at::detail::computeStorageNbytes(meta.sizes, meta.strides, c10::elementSize(meta.dtype), meta.offset);
}

ViewStep::~ViewStep() {
  if (device.load(std::memory_order_acquire) >= 0) {
    auto& r = storage_lists();
    const std::lock_guard<std::mutex> lock(r.mutex);
    const auto listed = device.load(std::memory_order_relaxed);
    if (listed >= 0) {  // a cut may have emptied the list since
      (previous != nullptr ? previous->next : r.views[listed]) = next;
      if (next != nullptr) {
        next->previous = previous;
      }
    }
  }
  // As with nodes, a long chain must not be released by nested destructors.
  auto step = std::move(parent);
  while (step.defined() && step.use_count() == 1) {
    auto up = std::move(step->parent);
    step = std::move(up);
  }
}

void ViewStep::remember(Value v, const Storage& storage) {
  value = std::move(v);
  generation = storage.generation;
  if (device.load(std::memory_order_relaxed) < 0) {
    auto& r = storage_lists();
    const std::lock_guard<std::mutex> lock(r.mutex);
    device.store(storage.index, std::memory_order_relaxed);
    next = r.views[device];
    if (next != nullptr) {
      next->previous = this;
    }
    r.views[storage.index] = this;
  }
}

void for_each_remembered(c10::DeviceIndex device, uint64_t until, const std::function<void(ViewStep&)>& visit) {
  auto& r = storage_lists();
  const std::lock_guard<std::mutex> lock(r.mutex);
  for (auto* step = r.views[device]; step != nullptr;) {
    auto* const following = step->next;
    if (step->value.node->sequence < until) {
      visit(*step);
    }
    step = following;
  }
}

Value ViewStep::forget() {
  (previous != nullptr ? previous->next : storage_lists().views[device]) = next;
  if (next != nullptr) {
    next->previous = previous;
  }
  previous = next = nullptr;
  auto remembered = std::exchange(value, {});
  device.store(-1, std::memory_order_release);
  return remembered;
}

Alias new_alias(Value value, MetaRef meta, c10::DeviceIndex device) {
  if (!value.node->leaf()) {
    check_captured_here(device);
  }
  Alias alias;
  alias.storage = c10::make_intrusive<Storage>(std::move(value), meta, device);
  alias.meta = std::move(meta);
  return alias;
}

// The storage has another layout since: what the tensor is, is still told by its strides.
void Alias::find_path() {
  path = as_strided(meta).path;
  layout = storage->layouts;
}

const Value& Alias::current() {
  if (layout != storage->layouts) {
    find_path();
  }
  resolve(storage->value);
  Value* latest = &storage->value;
  if (path.defined()) {
    // Down to the nearest step that still knows its value, and up again.
    std::vector<ViewStep*> behind;
    auto* step = path.get();
    for (; step != nullptr && (!step->value || step->generation != storage->generation); step = step->parent.get()) {
      behind.push_back(step);
    }
    if (step != nullptr) {
      resolve(step->value);
      latest = &step->value;
    }
    for (size_t i = behind.size(); i-- > 0;) {
      behind[i]->remember(forward(*behind[i], *latest), *storage);
      latest = &behind[i]->value;
    }
  }
  check_value(*latest->node, storage->index);
  return *latest;
}

void Alias::write(Value v) {
  if (layout != storage->layouts) {
    find_path();
  }
  ViewPath through = path;
  if (path.defined() && path->overlaps_itself) {  // only memory says which elements a write reaches
    auto [once, written] = without_overlap(std::move(v), current(), meta);
    v = std::move(once);
    through = strided_path(storage->meta, written);
  }
  check_captured_here(storage->index);
  ++storage->generation;
  if (!path.defined()) {
    storage->value = with_storage_placement(*storage, std::move(v));
    note_write(*storage);
    return;
  }
  const auto steps = steps_of(through);
  resolve(storage->value);
  Vector<Value> inputs{storage->value};
  for (size_t i = 0; i + 1 < steps.size(); ++i) {
    inputs.push_back(forward(*steps[i], inputs.back()));
  }
  Value back = v;
  for (size_t i = steps.size(); i-- > 0;) {
    back = inverse(*steps[i], inputs[i], back);
  }
  storage->value = std::move(back);
  note_write(*storage);
  if (!path->overlaps_itself) {  // a view with repeated elements must see its own write, so it replays
    path->remember(std::move(v), *storage);
  }
}

Alias Alias::view(OpInfo& op, Args step_args, const MetaSetPtr& out, const NodePtr& node) const {
  Alias result;
  result.storage = storage;
  result.path = make_step(path, op, std::move(step_args), meta, out);
  result.meta = {out, 0};
  if (layout == storage->layouts && shows_storage(result.path, *storage->meta)) {
    result.path = {};  // a write goes straight to the storage, and its value is the view's
  } else {
    result.path->remember({node, 0}, *storage);
  }
  result.layout = layout;
  return result;
}

Alias Alias::as_strided(const MetaRef& strided) const {
  auto result = memory_alias(storage, strided);
  result.path = with_lazy_bits(std::move(result.path), lazy_bits_of(path), result.meta);
  return result;
}

Alias memory_alias(StoragePtr storage, const MetaRef& strided) {
  Alias result;
  const auto& base = *storage->meta;
  if (strided->layout == base.layout && strided->offset == base.offset) {
    result.meta = storage->meta;
  } else {
    result.path = strided_path(storage->meta, strided);
    result.meta = {result.path->out, 0};
  }
  result.layout = storage->layouts;
  result.storage = std::move(storage);
  return result;
}

}  // namespace torch_xla
