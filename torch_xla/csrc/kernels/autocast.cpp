// `torch.autocast("xla")`: which operators run in the lower precision, in float32, or in the widest of their types. The
// lists are PyTorch's own, those of CUDA, so that a script behaves alike on both.
#include <ATen/autocast_mode.h>

namespace torch_xla {

namespace {

// The lists name their types without a namespace, and not the same ones in each version.
using namespace at;

constexpr auto kXla = c10::DeviceType::XLA;

Tensor no_binary_cross_entropy(const Tensor& /*input*/, const Tensor& /*target*/,
                               const std::optional<Tensor>& /*weight*/, int64_t /*reduction*/) {
  TORCH_CHECK(false,
              "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
              "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
              "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
              "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
              "safe to autocast.");
}

}  // namespace

TORCH_LIBRARY_IMPL(_, AutocastXLA, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastXLA, m) {
#define LOWER_PRECISION(...) KERNEL(kXla, __VA_ARGS__, lower_precision_fp)
#define FLOAT32(...) KERNEL(kXla, __VA_ARGS__, fp32)
#define FLOAT32_DTYPE(...) KERNEL(kXla, __VA_ARGS__, fp32_set_opt_dtype)
#define APPEND_DTYPE(...) KERNEL_DIFFERENT_REDISPATCH_SIGNATURE(kXla, __VA_ARGS__)
#define PROMOTE(...) KERNEL(kXla, __VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
  AT_FORALL_FP32(FLOAT32)
  AT_FORALL_FP32_SET_OPT_DTYPE(FLOAT32_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(APPEND_DTYPE)
  AT_FORALL_PROMOTE(PROMOTE)
#undef LOWER_PRECISION
#undef FLOAT32
#undef FLOAT32_DTYPE
#undef APPEND_DTYPE
#undef PROMOTE
  m.impl("binary_cross_entropy", TORCH_FN(no_binary_cross_entropy));
}

}  // namespace torch_xla
