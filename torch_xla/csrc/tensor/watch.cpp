#include "tensor/watch.h"

namespace torch_xla {

Watch* watching = nullptr;

void note_touched(const at::Tensor& tensor) {
  auto* const impl = tensor.unsafeGetTensorImpl();
  if (impl->is_inference() || watching->touched.count(impl) != 0) {
    return;
  }
  const auto& version = impl->version_counter();
  watching->touched.emplace(
      impl, Watch::Touched{Watch::WeakTensor(tensor.getIntrusivePtr()), version, version.current_version()});
}

void note_upload(const at::Tensor& source, const NodePtr& leaf) {
  if (watching != nullptr) {
    const auto& meta = leaf->meta(0);
    watching->uploads.push_back({Watch::WeakTensor(source.getIntrusivePtr()),
                                 c10::weak_intrusive_ptr<Node>(leaf),
                                 {meta.sizes.begin(), meta.sizes.end()},
                                 meta.dtype});
  }
}

}  // namespace torch_xla
