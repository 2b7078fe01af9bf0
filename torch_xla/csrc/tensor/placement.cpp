#include "tensor/placement.h"

#include <ATen/ATen.h>
#include <torch/library.h>

#include <atomic>

#include "base/python_hooks.h"
#include "device/device.h"
#include "ir/op_info.h"
#include "tensor/placeholder.h"
#include "tensor/tensor_impl.h"

namespace torch_xla {

namespace {

OpInfo& mark() {
  static auto& op = op_info("xla::place", "");
  return op;
}

// The value with a wish: the operator gives its input, in that place.
Value marked(Value value, uint32_t placement) {
  const MetaRef meta{value.node->outs, value.index};
  auto outs = single(meta);
  return {make_node(mark(), {input_arg(), attr(static_cast<int64_t>(placement))}, {std::move(value)}, std::move(outs)),
          0};
}

// Whether a leaf is nowhere yet, and so will be where it is asked to be.
bool waits(const Node& leaf) { return find_values(leaf).values != nullptr || leaf.unfilled() || is_placeholder(leaf); }

std::atomic<bool> all_at_once{false};

// Tokens, positions, masks: what the host reads and computes with as often as the device does.
bool is_state(const at::Tensor& cpu) {
  constexpr int64_t kMost = 1 << 16;
  constexpr int64_t kMostDimensions = 64;
  return c10::isIntegralType(cpu.scalar_type(), /*includeBool=*/true) && cpu.numel() <= kMost &&
         cpu.dim() <= kMostDimensions && !all_at_once.load(std::memory_order_relaxed);
}

}  // namespace

void send_all_at_once() { all_at_once.store(true); }

void Upload::fetch(const NodePtr& leaf) {
  auto* const buffer = upload(values, device, leaf->placement, kept);
  c10::intrusive_ptr<Source> done;  // destroyed after the lock is gone
  const RecorderLock lock;
  give_own(*leaf, buffer);
  done = std::move(leaf->source);
  leaf->source = {};
}

Value make_upload(const MetaRef& meta, const at::Tensor& cpu, c10::DeviceIndex device, uint32_t asked) {
  if (!spans_mesh() && !is_state(cpu)) {
    return make_leaf(meta, upload(cpu, device, kWhole, false));
  }
  // The caller may change its tensor before a program takes this.
  auto values = cpu.detach().clone(at::MemoryFormat::Contiguous);
  auto leaf = make_leaf(meta, nullptr);
  leaf.node->source = c10::make_intrusive<Upload>(std::move(values), device, /*kept=*/!spans_mesh());
  leaf.node->placement = asked == kAnywhere ? kWhole : asked;
  return leaf;
}

Value placed(Storage& storage, Value value) {
  const auto& node = *value.node;
  if (!spans_mesh() || !node.leaf() || node.unfilled() || node.error != nullptr) {
    return value;
  }
  if (is_whole(storage.placement) || storage.placement == kAnywhere) {
    storage.placement = node.placement;
  }
  if (value.node.use_count() == 1 && waits(node)) {  // nobody has it yet
    value.node->placement = storage.placement;
  }
  return node.placement == storage.placement ? value : marked(std::move(value), storage.placement);
}

bool place(const at::Tensor& tensor, uint32_t placement, bool recorded) {
  auto& alias = impl_of(tensor)->alias;
  Value old;  // destroyed after the lock is gone
  const RecorderLock lock;
  old = alias.current();
  auto& storage = *alias.storage;
  if (alias.path.defined()) {
    alias.path->remember(marked(old, placement), storage);
    return true;
  }
  storage.placement = placement;
  auto& node = *old.node;
  if (node.leaf()) {
    if (waits(node) || (is_whole(node.placement) && is_whole(placement))) {
      node.placement = placement;
    }
    if (node.placement == placement || !recorded) {
      return node.placement == placement;
    }
  }
  if (!node.fill) {
    storage.value = marked(old, placement);
  }
  return true;
}

void replace_buffer(const at::Tensor& tensor, PyObject* buffer, uint32_t placement) {
  auto& alias = impl_of(tensor)->alias;
  Value old;  // destroyed after the lock is gone
  Value synced;
  const RecorderLock lock;
  auto leaf = make_leaf(alias.storage->meta, buffer);
  leaf.node->placement = placement;
  leaf.node->frame = alias.storage->value.node->frame;
  synced = std::exchange(alias.storage->synced, leaf);
  old = std::exchange(alias.storage->value, std::move(leaf));
  alias.storage->placement = placement;
}

uint32_t placement_of(const at::Tensor& tensor) {
  const RecorderLock lock;
  auto& alias = impl_of(tensor)->alias;
  const auto& node = *alias.current().node;
  if (!node.leaf() && node.op == &mark()) {
    return static_cast<uint32_t>(node.args[1].value.toInt());
  }
  if (alias.path.defined()) {
    return kAnywhere;
  }
  const auto asked = alias.storage->placement;
  return node.leaf() && node.placement != kAnywhere && !(is_whole(node.placement) && is_whole(asked)) ? node.placement
                                                                                                      : asked;
}

TORCH_LIBRARY_FRAGMENT(xla, m) { m.def("place(Tensor self, int placement) -> Tensor"); }
at::Tensor place_anywhere(const at::Tensor& self, int64_t /*placement*/) { return self.clone(); }
TORCH_LIBRARY_IMPL(xla, CPU, m) { m.impl("place", &place_anywhere); }
TORCH_LIBRARY_IMPL(xla, Meta, m) { m.impl("place", &place_anywhere); }

}  // namespace torch_xla
