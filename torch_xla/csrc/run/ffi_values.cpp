#if __has_include(<xla/ffi/api/ffi.h>)
#include "run/ffi_values.h"

namespace torch_xla {

namespace ffi = xla::ffi;

namespace {

at::ScalarType scalar_type(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::PRED:
      return at::kBool;
    case ffi::DataType::U8:
      return at::kByte;
    case ffi::DataType::S8:
      return at::kChar;
    case ffi::DataType::S16:
      return at::kShort;
    case ffi::DataType::S32:
      return at::kInt;
    case ffi::DataType::S64:
      return at::kLong;
    case ffi::DataType::U16:
      return at::kUInt16;
    case ffi::DataType::U32:
      return at::kUInt32;
    case ffi::DataType::U64:
      return at::kUInt64;
    case ffi::DataType::F16:
      return at::kHalf;
    case ffi::DataType::BF16:
      return at::kBFloat16;
    case ffi::DataType::F32:
      return at::kFloat;
    case ffi::DataType::F64:
      return at::kDouble;
    case ffi::DataType::C64:
      return at::kComplexFloat;
    case ffi::DataType::C128:
      return at::kComplexDouble;
    default:
      TORCH_CHECK(false, "[host kernel] got XLA dtype ", static_cast<int>(type), ", which PyTorch does not have");
  }
}

}  // namespace

at::Tensor tensor_at(const ffi::AnyBuffer& buffer) {
  const auto sizes = buffer.dimensions();
  return at::from_blob(buffer.untyped_data(), at::IntArrayRef(sizes.begin(), sizes.size()),
                       at::TensorOptions().dtype(scalar_type(buffer.element_type())));
}

}  // namespace torch_xla

#endif
