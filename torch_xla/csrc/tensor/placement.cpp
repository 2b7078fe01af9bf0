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

OpInfo& placement_op() {
  static auto& op = op_info("xla::place", "");
  return op;
}

// The value behind an operator that gives its input with another placement, as a sharding constraint does.
Value with_placement(Value value, uint32_t placement) {
  const MetaRef meta{value.node->outs, value.index};
  auto outs = single(meta);
  return {make_node(placement_op(), {input_arg(), attr(static_cast<int64_t>(placement))}, {std::move(value)},
                    std::move(outs)),
          0};
}

// Whether a leaf is on no device yet, so that a placement costs nothing.
bool has_no_buffer_yet(const Node& leaf) {
  return find_values(leaf).values != nullptr || leaf.is(Source::Kind::NumberFill) || leaf.is(Source::Kind::Placeholder);
}

std::atomic<bool> eager_uploads{false};

// Tokens, positions, masks: what the host reads and computes with as often as the device does.
bool is_state(const at::Tensor& cpu) {
  constexpr int64_t kMost = 1 << 16;
  constexpr int64_t kMostDimensions = 64;
  return c10::isIntegralType(cpu.scalar_type(), /*includeBool=*/true) && cpu.numel() <= kMost &&
         cpu.dim() <= kMostDimensions && !eager_uploads.load(std::memory_order_relaxed);
}

}  // namespace

void upload_eagerly() { eager_uploads.store(true); }

void HostValues::fetch(const NodePtr& leaf) {
  auto* const buffer = upload(values, device, leaf->placement, immutable);
  c10::intrusive_ptr<Source> old_source;  // destroyed after the lock is gone
  const RecorderLock lock;
  install_buffer(*leaf, buffer);
  old_source = std::move(leaf->source);
  leaf->source = {};
}

Value make_upload(const MetaRef& meta, const at::Tensor& cpu, c10::DeviceIndex device, uint32_t placement) {
  if (!spans_mesh() && !is_state(cpu)) {
    return make_leaf(meta, upload(cpu, device, kReplicated, false));
  }
  // The caller may change its tensor before a program takes this.
  auto values = cpu.detach().clone(at::MemoryFormat::Contiguous);
  auto leaf = make_leaf(meta, nullptr);
  leaf.node->source = c10::make_intrusive<HostValues>(std::move(values), device, /*immutable=*/!spans_mesh());
  leaf.node->placement = placement == kUnspecified ? kReplicated : placement;
  return leaf;
}

at::Tensor uploaded(const at::Tensor& cpu, const std::vector<int64_t>& strides, c10::DeviceIndex device) {
  auto leaf = make_upload(contiguous_meta(cpu.sizes(), cpu.scalar_type()), cpu, device);
  return make_tensor(std::move(leaf), make_meta(cpu.sizes(), strides, 0, cpu.scalar_type()), device);
}

Value with_storage_placement(Storage& storage, Value value) {
  const auto& node = *value.node;
  if (!spans_mesh() || !node.leaf() || node.is(Source::Kind::NumberFill) || node.is(Source::Kind::Lost)) {
    return value;
  }
  if (is_replicated(storage.placement) || storage.placement == kUnspecified) {
    storage.placement = node.placement;
  }
  if (value.node.use_count() == 1 && has_no_buffer_yet(node)) {  // nobody has it yet
    value.node->placement = storage.placement;
  }
  return node.placement == storage.placement ? value : with_placement(std::move(value), storage.placement);
}

bool set_placement(const at::Tensor& tensor, uint32_t placement, bool recorded) {
  auto& alias = impl_of(tensor)->alias;
  Value old;  // destroyed after the lock is gone
  const RecorderLock lock;
  old = alias.current();
  auto& storage = *alias.storage;
  if (alias.path.defined()) {
    alias.path->remember(with_placement(old, placement), storage);
    return true;
  }
  storage.placement = placement;
  auto& node = *old.node;
  if (node.leaf()) {
    if (has_no_buffer_yet(node) || (is_replicated(node.placement) && is_replicated(placement))) {
      node.placement = placement;
    }
    if (node.placement == placement || !recorded) {
      return node.placement == placement;
    }
  }
  if (!node.fill) {
    storage.value = with_placement(old, placement);
  }
  return true;
}

void replace_buffer(const at::Tensor& tensor, PyObject* buffer, uint32_t placement) {
  auto& storage = *impl_of(tensor)->alias.storage;
  Vector<Value> old;  // destroyed after the lock is gone
  const RecorderLock lock;
  auto leaf = make_leaf(storage.meta, buffer);
  leaf.node->placement = placement;
  leaf.node->frame = storage.value.node->frame;
  storage.commit(std::move(leaf), old);
  storage.placement = placement;
  ++storage.generation;  // views know values that were made of the other buffer
}

uint32_t placement_of(const at::Tensor& tensor) {
  const RecorderLock lock;
  auto& alias = impl_of(tensor)->alias;
  const auto& node = *alias.current().node;
  if (!node.leaf() && node.op == &placement_op()) {
    return static_cast<uint32_t>(node.args[1].value.toInt());
  }
  if (alias.path.defined()) {
    return kUnspecified;
  }
  const auto requested = alias.storage->placement;
  return node.leaf() && node.placement != kUnspecified && !(is_replicated(node.placement) && is_replicated(requested))
             ? node.placement
             : requested;
}

TORCH_LIBRARY_FRAGMENT(xla, m) { m.def("place(Tensor self, int placement) -> Tensor"); }
at::Tensor ignore_placement(const at::Tensor& self, int64_t /*placement*/) { return self.clone(); }
TORCH_LIBRARY_IMPL(xla, CPU, m) { m.impl("place", &ignore_placement); }
TORCH_LIBRARY_IMPL(xla, Meta, m) { m.impl("place", &ignore_placement); }

}  // namespace torch_xla
