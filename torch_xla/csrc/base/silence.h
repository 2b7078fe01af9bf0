// A scope in which PyTorch's kernels warn of nothing: who calls them has warned, or will.
#pragma once
#include <c10/util/Exception.h>

namespace torch_xla {

class Silence {
  struct Nobody final : c10::WarningHandler {
    void process(const c10::Warning& /*warning*/) override {}
  } nobody_;
  const c10::WarningUtils::WarningHandlerGuard quiet_{&nobody_};
};

}  // namespace torch_xla
