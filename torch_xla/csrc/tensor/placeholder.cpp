#include "tensor/placeholder.h"

#include <atomic>

#include "device/capture.h"
#include "tensor/tensor_impl.h"

namespace torch_xla {

namespace {

std::atomic<int64_t> living{0};

struct Placeholder final : Source {
  Placeholder() { ++living; }
  ~Placeholder() override { --living; }
  bool is_placeholder() const override { return true; }
  void fetch(const NodePtr& /*leaf*/) override {
    TORCH_CHECK(false,
                "[tensor] got a placeholder, expected a tensor with values; it can be traced, not computed with");
  }
};

struct Uncomputed final : Source {
  void fetch(const NodePtr& leaf) override { TORCH_CHECK(false, *leaf->error); }
};

}  // namespace

at::Tensor make_placeholder(const MetaRef& meta, c10::DeviceIndex device) {
  auto leaf = make_leaf(meta, nullptr);
  leaf.node->source = c10::make_intrusive<Placeholder>();
  return make_tensor(std::move(leaf), meta, device);
}

bool is_placeholder(const at::Tensor& tensor) {
  const RecorderLock lock;
  return is_xla(tensor) && is_placeholder(*impl_of(tensor)->alias.storage->value.node);
}

bool is_placeholder(const Node& leaf) { return leaf.source.defined() && leaf.source->is_placeholder(); }

Value make_uncomputed(const MetaRef& meta) {
  auto leaf = make_lost(meta,
                        "[graph] got a tensor that was made while a graph was captured, expected a replay before its "
                        "value is used; call replay()");
  leaf.node->source = c10::make_intrusive<Uncomputed>();
  return leaf;
}

void check_value(const Node& leaf, c10::DeviceIndex device) {
  if (leaf.error != nullptr) {
    const bool uncomputed = leaf.source.defined();  // what lost its value has none
    TORCH_CHECK(uncomputed && is_captured(device), *leaf.error);
  }
}

bool any_placeholders() { return living.load(std::memory_order_relaxed) > 0; }

}  // namespace torch_xla
