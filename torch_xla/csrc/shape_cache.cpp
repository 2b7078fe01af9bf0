#include "shape_cache.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>
#include <unordered_map>

#include "tensor_impl.h"

namespace torch_xla {

namespace {

std::atomic<uint64_t> misses{0};

std::unordered_map<Hash, MetaSetPtr, HashHasher>& table() {
  static auto* const t = new std::unordered_map<Hash, MetaSetPtr, HashHasher>();
  return *t;
}

at::Tensor meta_twin(const at::Tensor& t) {
  if (!t.defined() || (!is_xla(t) && t.dim() == 0)) {
    return t;
  }
  auto twin = at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type());
  if (is_xla(t) && t.storage_offset() != 0) {
    twin.unsafeGetTensorImpl()->set_storage_offset(t.storage_offset());
  }
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) {
    twin.unsafeGetTensorImpl()->set_wrapped_number(true);
  }
  return twin;
}

c10::IValue meta_argument(const c10::IValue& v) {
  if (v.isTensor()) {
    return meta_twin(v.toTensor());
  }
  if (v.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : v.toTensorList()) {
      list.push_back(meta_twin(t));
    }
    return list;
  }
  if (v.isList() && v.toList().elementType()->kind() == c10::TypeKind::OptionalType) {
    c10::List<std::optional<at::Tensor>> list;
    for (const auto& e : v.toListRef()) {
      list.push_back(e.isTensor() ? std::optional<at::Tensor>(meta_twin(e.toTensor())) : std::nullopt);
    }
    return list;
  }
  if (v.isDevice()) {
    return c10::Device(c10::DeviceType::Meta);
  }
  if (v.isGenerator()) {
    return c10::IValue();
  }
  return v;
}

void add_meta(MetaSet& set, const at::Tensor& t) {
  Meta m;
  if (t.defined()) {
    m.sizes.assign(t.sizes().begin(), t.sizes().end());
    m.strides.assign(t.strides().begin(), t.strides().end());
    m.offset = t.storage_offset();
    m.dtype = t.scalar_type();
  }
  set.metas.push_back(std::move(m));
}

void add_result(MetaSet& set, const c10::IValue& v) {
  if (v.isTensorList()) {
    const auto list = v.toTensorList();
    set.returns.push_back(static_cast<int32_t>(list.size()));
    for (const at::Tensor& t : list) {
      add_meta(set, t);
    }
  } else {
    TORCH_CHECK(v.isTensor(), "[record] an operator returned a ", v.tagKind(), " where a tensor was expected");
    set.returns.push_back(-1);
    add_meta(set, v.toTensor());
  }
}

}  // namespace

const MetaSetPtr* find_metas(const Hash& key) {
  const auto found = table().find(key);
  return found == table().end() ? nullptr : &found->second;
}

void remember_metas(const Hash& key, MetaSetPtr metas) { table().emplace(key, std::move(metas)); }

MetaSetPtr infer_metas(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments) {
  misses.fetch_add(1, std::memory_order_relaxed);
  torch::jit::Stack stack;
  stack.reserve(arguments.size());
  for (const auto& v : arguments) {
    stack.push_back(meta_argument(v));
  }
  const std::vector<c10::IValue> inputs(stack.begin(), stack.end());
  {
    const c10::impl::ExcludeDispatchKeyGuard guard(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
    info.op.callBoxed(stack);
  }
  auto set = c10::make_intrusive<MetaSet>();
  for (size_t r = 0; r < stack.size(); ++r) {
    if (info.return_writes[r] < 0) {
      add_result(*set, stack[r]);
    }
  }
  for (const auto position : info.written) {
    const auto& v = inputs[position];
    if (!v.isNone()) {
      add_result(*set, v);
    }
  }
  set->rehash();
  return set;
}

uint64_t shape_cache_misses() { return misses.load(std::memory_order_relaxed); }

}  // namespace torch_xla
