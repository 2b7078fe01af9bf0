#include "tensor/placeholder.h"

#include <atomic>

#include "device/capture.h"
#include "tensor/tensor_impl.h"

namespace torch_xla {

namespace {

std::atomic<int64_t> living{0};

struct Placeholder final : Source {
  Placeholder() : Source(Kind::Placeholder) { ++living; }
  ~Placeholder() override { --living; }
  void fetch(const NodePtr& /*leaf*/) override {
    TORCH_CHECK(false,
                "[tensor] got a placeholder, expected a tensor with values; it can be traced, not computed with");
  }
};

}  // namespace

at::Tensor make_placeholder(const MetaRef& meta, c10::DeviceIndex device) {
  auto leaf = make_leaf(meta, nullptr);
  leaf.node->source = c10::make_intrusive<Placeholder>();
  return make_tensor(std::move(leaf), meta, device);
}

bool is_placeholder(const at::Tensor& tensor) {
  const RecorderLock lock;
  return is_xla(tensor) && impl_of(tensor)->alias.storage->value.node->is(Source::Kind::Placeholder);
}

void check_value(const Node& leaf, c10::DeviceIndex device) {
  if (leaf.is(Source::Kind::Lost)) {
    const auto& lost = static_cast<const Lost&>(*leaf.source);
    TORCH_CHECK(lost.uncomputed && is_captured(device), lost.why);
  }
}

bool any_placeholders() { return living.load(std::memory_order_relaxed) > 0; }

}  // namespace torch_xla
