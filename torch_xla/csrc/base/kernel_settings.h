// What PyTorch's kernels read of the process while they run, which may be another time than that of their call.
#pragma once
#include <c10/core/ScalarType.h>

#include "base/call_settings.h"

namespace torch_xla {

// The default dtype of recorded settings.
c10::ScalarType default_dtype(CallSettings settings);

// The rest of it, as it was when a run of kernels began.
class KernelSettings {
 public:
  // Whether a kernel, asked before and after it, computes as a call with these settings is to be.
  bool matches(CallSettings settings) const;

 private:
  static int precision_of_products();
  const int precision_ = precision_of_products();
};

}  // namespace torch_xla
