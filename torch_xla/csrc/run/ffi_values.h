// What XLA gives a function that its programs call on a CPU, as PyTorch's values.
#pragma once
#include <ATen/ATen.h>
#include <xla/ffi/api/ffi.h>

#include <string>
#include <string_view>

namespace torch_xla {

using FfiNumbers = xla::ffi::Span<const int64_t>;

// A tensor on the memory of a buffer.
at::Tensor tensor_at(const xla::ffi::AnyBuffer& buffer);

template <typename T>
T ffi_attribute(const xla::ffi::Dictionary& attributes, std::string_view name) {
  auto attribute = attributes.get<T>(name);
  TORCH_CHECK(attribute.has_value(), "[host kernel] got no usable attribute ", name, ": ", attribute.error().message());
  return *attribute;
}

inline std::string ffi_text(const xla::ffi::Dictionary& attributes, std::string_view name) {
  return std::string(ffi_attribute<std::string_view>(attributes, name));
}

}  // namespace torch_xla
