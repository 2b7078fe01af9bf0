// What a step computes with, noted while it is recorded, so that it can be run again without being recorded.
#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/UndefinedTensorImpl.h>

#include <unordered_map>
#include <utility>
#include <vector>

#include "ir/node.h"

namespace torch_xla {

struct Watch {
  using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  struct Touched {
    WeakTensor tensor;
    c10::VariableVersion version;
    uint32_t before = 0;  // what it was then
  };
  // A host tensor that was copied to the device.
  struct Upload {
    WeakTensor source;
    c10::weak_intrusive_ptr<Node> leaf;
    std::vector<int64_t> sizes;
    at::ScalarType dtype;
  };
  std::unordered_map<const c10::TensorImpl*, Touched> touched;
  std::vector<Upload> uploads;
};

// There is one, or none. All of these want the recorder's lock.
extern Watch* watching;
void note_touched(const at::Tensor& tensor);
void note_upload(const at::Tensor& source, const NodePtr& leaf);

inline void touch(const at::Tensor& tensor) {
  if (C10_UNLIKELY(watching != nullptr)) {
    note_touched(tensor);
  }
}

}  // namespace torch_xla
