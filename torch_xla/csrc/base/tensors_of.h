// The tensors in an argument or a result of a call: it may be one, a list of them, or a list that lacks some.
#pragma once
#include <ATen/core/ivalue.h>

namespace torch_xla {

template <class Visit>
void for_each_tensor(const c10::IValue& v, const Visit& visit) {
  if (v.isTensor()) {
    if (v.toTensor().defined()) {
      visit(v.toTensor());
    }
  } else if (v.isTensorList() || v.isOptionalTensorList()) {
    for (const auto& e : v.toListRef()) {
      for_each_tensor(e, visit);
    }
  }
}

// The same with other tensors in their place.
template <class Replace>
c10::IValue with_tensors(const c10::IValue& v, Replace&& replace) {
  if (v.isTensor() && v.toTensor().defined()) {
    return replace(v.toTensor());
  }
  if (v.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& t : v.toTensorList()) {
      list.push_back(replace(t));
    }
    return list;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& t : v.toOptionalTensorList()) {
      list.push_back(t && t->defined() ? std::optional<at::Tensor>(replace(*t)) : std::nullopt);
    }
    return list;
  }
  return v;
}

}  // namespace torch_xla
