// Finding a loop in what was recorded on a device since its latest barrier.
#pragma once
#include <cstdint>
#include <optional>

#include "ir/node.h"

namespace torch_xla {

struct DetectedLoop {
  size_t calls = 0;       // of a segment
  size_t carried = 0;     // values that one segment gives to the next
  Frame frame = nullptr;  // the user's line where a segment begins
};

// Searches the window of the call trace; with `follow` the loop is followed from now on. Takes the recorder's lock.
//
// `growing` is for loops of which every turn has other sizes or constants, and so a graph of its own.
std::optional<DetectedLoop> detect_loop(c10::DeviceIndex device, bool growing, bool follow);

}  // namespace torch_xla
