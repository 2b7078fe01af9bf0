// What PyTorch's operators read beside their arguments: its switches, as they are when a call is recorded.
#pragma once
#include <cstdint>

namespace torch_xla {

// The default dtype and whether algorithms are to be deterministic, in a byte; 0 where nobody has set any. A node keeps
// it, is another for another one, and is lowered and computed as it says.
using CallSettings = uint8_t;

CallSettings call_settings();

}  // namespace torch_xla
