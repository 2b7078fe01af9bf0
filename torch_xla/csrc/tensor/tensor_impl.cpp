#include "tensor/tensor_impl.h"

#include <ATen/EmptyTensor.h>

#include <atomic>

#include "ir/op_info.h"
#include "tensor/view_path.h"

namespace torch_xla {

namespace {
std::atomic<uint64_t> created{0};
std::atomic<uint64_t> destroyed{0};

// Beside a tensor of PyTorch's own class that has the memory of an xla tensor.
struct AliasMeta final : c10::BackendMeta, Aliased {
  explicit AliasMeta(Alias a) : Aliased{std::move(a)} {}
  c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>& /*self*/) const override {
    const RecorderLock lock;
    return c10::make_intrusive<AliasMeta>(alias);
  }
};

// Beside a tensor whose memory is about to be another's: PyTorch copies what is beside it too.
struct CopySource final : c10::BackendMeta {
  explicit CopySource(c10::TensorImpl* from) : from(from) {}
  c10::intrusive_ptr<c10::BackendMeta> clone(const c10::intrusive_ptr<c10::BackendMeta>& /*self*/) const override {
    const RecorderLock lock;
    if (const auto* const source = aliased(from)) {
      return c10::make_intrusive<AliasMeta>(source->alias);
    }
    return {};
  }
  c10::TensorImpl* from;  // what this is beside
};
}  // namespace

uint64_t created_tensors() { return created.load(std::memory_order_relaxed); }
uint64_t destroyed_tensors() { return destroyed.load(std::memory_order_relaxed); }

XlaTensorImpl::XlaTensorImpl(Alias a)
    : TensorImpl(c10::Storage(a.storage), c10::DispatchKeySet(c10::DispatchKey::XLA),
                 c10::scalarTypeToTypeMeta(a.meta->dtype)),
      Aliased{std::move(a)} {
  created.fetch_add(1, std::memory_order_relaxed);
  refresh_metadata();
}

XlaTensorImpl::XlaTensorImpl(Alias a, c10::DispatchKeySet viewed)
    : TensorImpl(TensorImpl::VIEW, c10::Storage(a.storage), viewed, c10::scalarTypeToTypeMeta(a.meta->dtype)),
      Aliased{std::move(a)} {
  created.fetch_add(1, std::memory_order_relaxed);
  refresh_metadata();
}

XlaTensorImpl::~XlaTensorImpl() { destroyed.fetch_add(1, std::memory_order_relaxed); }

void XlaTensorImpl::refresh_metadata() {
  const auto& meta = *alias.meta;
  sizes_and_strides_.set_sizes(meta.sizes);
  sizes_and_strides_.set_strides(meta.strides);
  storage_offset_ = meta.offset;
  data_type_ = c10::scalarTypeToTypeMeta(meta.dtype);
  refresh_numel();
  if (meta.row_major && meta.sizes.size() < 4) {  // what refresh_contiguous would find
    is_contiguous_ = is_non_overlapping_and_dense_ = true;
    is_channels_last_ = is_channels_last_contiguous_ = is_channels_last_3d_ = is_channels_last_3d_contiguous_ = false;
  } else {
    refresh_contiguous();
  }
}

template <class Version>
c10::intrusive_ptr<c10::TensorImpl> XlaTensorImpl::copy_detached(Version&& version, bool allow_metadata_change) const {
  if (!alias.storage) {
    return TensorImpl::shallow_copy_and_detach(std::forward<Version>(version), allow_metadata_change);
  }
  Alias copy;
  {
    const RecorderLock lock;
    copy = alias;
  }
  auto result = c10::make_intrusive<XlaTensorImpl>(std::move(copy));
  copy_tensor_metadata(this, result.get(), std::forward<Version>(version), allow_metadata_change);
  result->drop_backend_meta();
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
  auto* const source = aliased(impl.get());
  TORCH_CHECK(source != nullptr || impl->device_type() != c10::DeviceType::XLA,
              "[tensor] got the data of a wrapper that claims to be on ", impl->device(),
              ", expected that of a tensor; unwrap it first");
  TensorImpl::shallow_copy_from(impl);
  drop_backend_meta();
  Alias other;  // holds the old one, to be destroyed after the lock is gone
  const RecorderLock lock;
  if (source != nullptr) {
    other = source->alias;  // copied first: the source may be this tensor
  }
  std::swap(alias, other);
  refresh_numel();
  refresh_contiguous();
}

void XlaTensorImpl::drop_backend_meta() {
  if (extra_meta_ != nullptr) {
    extra_meta_->backend_meta_.reset();
  }
}

void XlaTensorImpl::release_resources() {
  TensorImpl::release_resources();
  alias = {};
}

Aliased* aliased(c10::TensorImpl* impl) {
  if (typeid(*impl) == typeid(XlaTensorImpl)) {
    auto* const xla = static_cast<XlaTensorImpl*>(impl);
    return xla->alias.storage ? xla : nullptr;
  }
  auto* const backend_meta = impl->get_backend_meta();
  return backend_meta != nullptr && typeid(*backend_meta) == typeid(AliasMeta) ? static_cast<AliasMeta*>(backend_meta)
                                                                               : nullptr;
}

Aliased* aliased_or_throw(const at::Tensor& t) {
  auto* const alias_owner = t.defined() ? aliased(t.unsafeGetTensorImpl()) : nullptr;
  if (alias_owner == nullptr) {
    throw_not_ours(t);
  }
  return alias_owner;
}

bool takes_data(const at::Tensor& self, const at::Tensor& from) {
  auto* const target = self.unsafeGetTensorImpl();
  auto* const source = from.unsafeGetTensorImpl();
  const auto is_plain = [](c10::TensorImpl* impl) {
    const auto keys = impl->key_set();
    return aliased(impl) != nullptr || ((keys.has(c10::DispatchKey::CPU) || keys.has(c10::DispatchKey::Meta)) &&
                                        !keys.has(c10::DispatchKey::Python));
  };
  const bool is_ours = aliased(target) != nullptr || aliased(source) != nullptr;
  if (!target->has_compatible_shallow_copy_type(from.key_set()) && !(is_ours && is_plain(target) && is_plain(source))) {
    return false;
  }
  if (is_ours && typeid(*target) == typeid(c10::TensorImpl) && source->get_backend_meta() == nullptr) {
    source->set_backend_meta(c10::make_intrusive<CopySource>(source));
  }
  return true;
}

Alias rebind(const at::Tensor& t, Alias a) {
  auto* const impl = t.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(impl->sizes(), impl->strides());  // raises before anything is changed
  auto& alias = impl_of(t)->alias;
  std::swap(alias, a);
  impl->set_storage_and_dtype(c10::Storage(alias.storage), c10::scalarTypeToTypeMeta(alias.meta->dtype));
  impl->set_sizes_and_strides(alias.meta->sizes, alias.meta->strides, alias.meta->offset);
  return a;
}

void throw_not_ours(const at::Tensor& t) {
  TORCH_CHECK(t.defined(), "[tensor] got an undefined tensor, expected one on xla");
  TORCH_CHECK(!is_xla(t), "[tensor] got a wrapper that claims to be on ", t.device(),
              ", expected the tensor itself; unwrap it first");
  TORCH_CHECK(false, "[tensor] got a tensor on ", t.device(), ", expected one on xla; move it with .to('xla')");
}

at::Tensor make_tensor(Value leaf, const MetaRef& meta, c10::DeviceIndex device) {
  return make_tensor(new_alias(std::move(leaf), meta, device));
}

at::Tensor make_tensor(Alias alias) { return at::Tensor(c10::make_intrusive<XlaTensorImpl>(std::move(alias))); }

at::Tensor make_view(Alias alias, const at::Tensor& viewed) {
  return at::Tensor(c10::make_intrusive<XlaTensorImpl>(std::move(alias), viewed.key_set()));
}

void check_storage_device(const at::Tensor& self, c10::Device other) {
  TORCH_CHECK(self.device() == other, "Attempted to set the storage of a tensor on device \"", self.device(),
              "\" to a storage on different device \"", other,
              "\".  This is no longer allowed; the devices must match.");
}

void set_storage(const at::Tensor& self, const at::Storage& source, int64_t offset, c10::IntArrayRef sizes,
                 c10::IntArrayRef strides) {
  auto* const storage = dynamic_cast<Storage*>(source.unsafeGetStorageImpl());
  check_storage_device(self, source.device());
  TORCH_CHECK(storage != nullptr, "[set_] got a storage on ", source.device(),
              " that this package did not make, expected that of an xla tensor; copy it with .to('xla')");
  TORCH_CHECK(offset >= 0, "Tensor: invalid storage offset ", offset);
  TORCH_CHECK(strides.empty() || strides.size() == sizes.size(), "mismatch in length of strides and shape");
  const auto dense = contiguous_meta(sizes, self.scalar_type());
  const auto meta =
      make_meta(sizes, strides.empty() ? c10::IntArrayRef(dense->strides) : strides, offset, dense->dtype);
  at::detail::computeStorageNbytes(meta->sizes, meta->strides, self.element_size(), offset);  // raises: it overflows
  const auto shared = StoragePtr::reclaim_copy(storage);
  Vector<Value> replaced;
  Alias old;
  const RecorderLock lock;
  if (extent(*meta) > storage->nbytes()) {
    storage->resize(extent(*meta), {}, replaced);
  }
  old = rebind(self, memory_alias(shared, meta));
}

at::Tensor base_of(const at::Tensor& tensor) {
  Alias base;
  {
    const RecorderLock lock;
    const auto& alias = impl_of(tensor)->alias;
    if (!(lazy_bits_of(alias.path) == LazyBits())) {
      return {};
    }
    base = memory_alias(alias.storage, alias.storage->meta);
  }
  return make_tensor(std::move(base));
}

}  // namespace torch_xla
