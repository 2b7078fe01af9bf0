// Finding a loop in what was recorded on a device since its latest barrier.
#pragma once
#include <cstdint>
#include <optional>

#include "ir/node.h"

namespace torch_xla {

struct DetectedLoop {
  size_t calls = 0;       // of a piece
  size_t carried = 0;     // values that one piece gives to the next
  Frame frame = nullptr;  // the line where a piece begins
};

// Looks at the stream's window; what it finds is followed from now on, if asked for. Takes the recorder's lock.
//
// `growing` is for loops of which every turn has other sizes or constants, and so a graph of its own.
std::optional<DetectedLoop> detect_loop(c10::DeviceIndex device, bool growing, bool follow);

}  // namespace torch_xla
