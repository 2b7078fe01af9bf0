#include "tensor_impl.h"

#include <atomic>

namespace torch_xla {

namespace {
std::atomic<uint64_t> created{0};
}  // namespace

uint64_t created_tensors() { return created.load(std::memory_order_relaxed); }

XlaTensorImpl::XlaTensorImpl(Alias a)
    : TensorImpl(c10::DispatchKeySet(c10::DispatchKey::XLA), c10::scalarTypeToTypeMeta(a.meta->dtype),
                 c10::Device(c10::DeviceType::XLA, a.storage->device)),
      alias(std::move(a)) {
  created.fetch_add(1, std::memory_order_relaxed);
  set_storage_access_should_throw();
  refresh_metadata();
}

void XlaTensorImpl::refresh_metadata() {
  const auto& meta = *alias.meta;
  sizes_and_strides_.set_sizes(meta.sizes);
  sizes_and_strides_.set_strides(meta.strides);
  storage_offset_ = meta.offset;
  data_type_ = c10::scalarTypeToTypeMeta(meta.dtype);
  refresh_numel();
  refresh_contiguous();
}

template <class Version>
c10::intrusive_ptr<c10::TensorImpl> XlaTensorImpl::copy_detached(Version&& version, bool allow_metadata_change) const {
  Alias copy;
  {
    const RecorderLock lock;
    copy = alias;
  }
  auto result = c10::make_intrusive<XlaTensorImpl>(std::move(copy));
  copy_tensor_metadata(this, result.get(), std::forward<Version>(version), allow_metadata_change);
  result->refresh_numel();
  result->refresh_contiguous();
  return result;
}

c10::intrusive_ptr<c10::TensorImpl> XlaTensorImpl::shallow_copy_and_detach(const c10::VariableVersion& version,
                                                                           bool allow_metadata_change) const {
  return copy_detached(version, allow_metadata_change);
}

c10::intrusive_ptr<c10::TensorImpl> XlaTensorImpl::shallow_copy_and_detach(c10::VariableVersion&& version,
                                                                           bool allow_metadata_change) const {
  return copy_detached(std::move(version), allow_metadata_change);
}

void XlaTensorImpl::shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& impl) {
  auto* const source = dynamic_cast<XlaTensorImpl*>(impl.get());
  TORCH_CHECK(source != nullptr, "[tensor] cannot make an xla tensor share the memory of a ", impl->device(),
              " tensor; copy it with .to('xla') first");
  copy_tensor_metadata(source, this, version_counter(), allow_tensor_metadata_change());
  Alias other;  // holds the old one, to be destroyed after the lock is gone
  const RecorderLock lock;
  other = source->alias;  // copied first: the source may be this tensor
  std::swap(alias, other);
  refresh_numel();
  refresh_contiguous();
}

void XlaTensorImpl::rebind(Alias a) {
  alias = std::move(a);
  refresh_metadata();
}

XlaTensorImpl* impl_of(const at::Tensor& t) { return static_cast<XlaTensorImpl*>(t.unsafeGetTensorImpl()); }

at::Tensor make_tensor(Alias alias) { return at::Tensor(c10::make_intrusive<XlaTensorImpl>(std::move(alias))); }

}  // namespace torch_xla
