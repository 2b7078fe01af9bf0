// A scope in which PyTorch's kernels do not warn: the caller has warned already, or will.
#pragma once
#include <c10/util/Exception.h>

namespace torch_xla {

class NoWarnings {
  struct NullHandler final : c10::WarningHandler {
    void process(const c10::Warning& /*warning*/) override {}
  } handler_;
  const c10::WarningUtils::WarningHandlerGuard guard_{&handler_};
};

}  // namespace torch_xla
