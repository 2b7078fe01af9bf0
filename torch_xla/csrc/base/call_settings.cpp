#include "base/call_settings.h"

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>

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

void set_call_settings(CallSettings settings) {
  const auto dtype = static_cast<at::ScalarType>((settings & kDtypes) ^ kUsual);
  c10::set_default_dtype(c10::scalarTypeToTypeMeta(dtype));
  at::globalContext().setDeterministicAlgorithms((settings & kDeterministic) != 0, (settings & kWarnsOnly) != 0);
}

}  // namespace torch_xla
