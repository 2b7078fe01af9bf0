#include "base/call_settings.h"

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>

#include "base/kernel_settings.h"

namespace torch_xla {

namespace {

constexpr auto kUsual = static_cast<CallSettings>(at::kFloat);
constexpr CallSettings kDtypes = 0x3F;
constexpr CallSettings kDeterministic = 0x40;
constexpr CallSettings kWarnsOnly = 0x80;
static_assert(static_cast<int>(at::ScalarType::NumOptions) <= kDtypes);

}  // namespace

CallSettings call_settings() {
  const auto& context = at::globalContext();
  const auto dtype = static_cast<CallSettings>(c10::get_default_dtype_as_scalartype());
  return static_cast<CallSettings>((dtype ^ kUsual) | (context.deterministicAlgorithms() ? kDeterministic : 0) |
                                   (context.deterministicAlgorithmsWarnOnly() ? kWarnsOnly : 0));
}

c10::ScalarType default_dtype(CallSettings settings) {
  return static_cast<c10::ScalarType>((settings & kDtypes) ^ kUsual);
}

bool KernelSettings::matches(CallSettings settings) const {
  // What is deterministic is as good where nobody has asked for it.
  const bool deterministic = (settings & kDeterministic) == 0 || at::globalContext().deterministicAlgorithms();
  return deterministic && (precision_ < 0 || precision_ == precision_of_products());
}

int KernelSettings::precision_of_products() {
  try {
    return static_cast<int>(at::globalContext().float32MatmulPrecision());
  } catch (const c10::Error&) {  // set by the newer name of one, `fp32_precision`, which the older one refuses
    return -1;
  }
}

}  // namespace torch_xla
