// `tensor.data = other`, which asks whether it can work. With autograd's keys, as else wrappers would be asked too.
#include <torch/library.h>

#include "tensor/tensor_impl.h"

namespace torch_xla {

namespace {
void register_data(torch::Library& m) { m.impl("_has_compatible_shallow_copy_type", TORCH_FN(takes_data)); }
}  // namespace

TORCH_LIBRARY_IMPL(aten, XLA, m) { register_data(m); }
TORCH_LIBRARY_IMPL(aten, Meta, m) { register_data(m); }
TORCH_LIBRARY_IMPL(aten, AutogradXLA, m) { register_data(m); }
TORCH_LIBRARY_IMPL(aten, AutogradMeta, m) { register_data(m); }

}  // namespace torch_xla
