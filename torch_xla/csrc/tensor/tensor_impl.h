// The tensor: PyTorch's metadata plus an Alias.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/TensorImpl.h>

#include <typeinfo>

#include "tensor/storage.h"

namespace torch_xla {

// What a tensor is to the recorder.
struct Aliased {
  Alias alias;
};

class XlaTensorImpl final : public c10::TensorImpl, public Aliased, public Pooled<XlaTensorImpl> {
 public:
  explicit XlaTensorImpl(Alias alias);
  // A view of a tensor with these keys, which say whether that is an inference tensor; so is the view then, whatever
  // mode it is made in.
  XlaTensorImpl(Alias alias, c10::DispatchKeySet viewed);
  ~XlaTensorImpl() override;

  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(const c10::VariableVersion& version,
                                                         bool allow_metadata_change) const override;
  c10::intrusive_ptr<TensorImpl> shallow_copy_and_detach(c10::VariableVersion&& version,
                                                         bool allow_metadata_change) const override;
  // Of a CPU tensor too, which it then is itself.
  void shallow_copy_from(const c10::intrusive_ptr<TensorImpl>& impl) override;
  void release_resources() override;

 private:
  void refresh_metadata();
  void drop_backend_meta();  // what is beside a tensor is for those of PyTorch's own class
  template <class Version>
  c10::intrusive_ptr<TensorImpl> copy_detached(Version&& version, bool allow_metadata_change) const;
};

inline bool is_xla(const at::Tensor& t) { return t.defined() && t.device().type() == c10::DeviceType::XLA; }
// What the recorder knows of a tensor, null where that is nothing. One of PyTorch's own class has it beside it, where
// it was given the memory of an xla tensor: `parameter.data = tensor`, which is how a module moves.
Aliased* aliased(c10::TensorImpl* impl);
[[noreturn]] void throw_not_ours(const at::Tensor& t);
Aliased* aliased_or_throw(const at::Tensor& t);
// The one way from a tensor to what we know of it. A tensor that only claims to be on the device is refused: a wrapper
// of another class, a transform's, one on another device.
inline Aliased* impl_of(const at::Tensor& t) {
  auto* const impl = t.unsafeGetTensorImpl();
  if (C10_UNLIKELY(typeid(*impl) != typeid(XlaTensorImpl) || !static_cast<XlaTensorImpl*>(impl)->alias.storage)) {
    return aliased_or_throw(t);
  }
  return static_cast<XlaTensorImpl*>(impl);
}
// Whether `self.data = from` works, as it does between a CPU and a GPU; PyTorch asks before it copies.
bool takes_data(const at::Tensor& self, const at::Tensor& from);
// Makes a tensor another alias, with its shape: `set_`, `t_`, a resized `out=`. Wants the recorder's lock; what the
// tensor was is returned, to be destroyed after the lock is gone, since a storage may hold a Python object.
[[nodiscard]] Alias rebind(const at::Tensor& t, Alias alias);
at::Tensor make_tensor(Alias alias);
at::Tensor make_view(Alias alias, const at::Tensor& viewed);
// A new tensor of a leaf, as if it had had the value at the last barrier.
at::Tensor make_tensor(Value leaf, const MetaRef& meta, c10::DeviceIndex device);
// Refuses another device's storage in PyTorch's words.
void check_storage_device(const at::Tensor& self, c10::Device other);
// Makes a tensor address an xla storage; one that is too small grows, as PyTorch's do.
void set_storage(const at::Tensor& self, const at::Storage& source, int64_t offset, c10::IntArrayRef sizes,
                 c10::IntArrayRef strides);
// The tensor that is all of this one's storage, undefined where the strides do not tell what this one is (a conjugate).
at::Tensor base_of(const at::Tensor& tensor);
// Tensors on device xla made so far, and those of them that are gone.
uint64_t created_tensors();
uint64_t destroyed_tensors();

}  // namespace torch_xla
