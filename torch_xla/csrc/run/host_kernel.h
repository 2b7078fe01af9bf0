// PyTorch's CPU kernels, called by XLA:CPU from within a program.
#pragma once
#include <torch/csrc/utils/pybind.h>

namespace torch_xla {

// What XLA calls, as a capsule to be registered with it; none where the headers of jaxlib were missing at build time.
py::object host_kernel_target();

}  // namespace torch_xla
