// The user's own line: the innermost Python frame outside PyTorch and this package.
#pragma once
#include <memory>
#include <string>

namespace torch_xla {

// "file.py:12 in train"; null where the calling thread runs no Python. Takes the GIL.
std::unique_ptr<std::string> user_frame();
// Whether the frame of every recorded operator is kept (XLA_IR_DEBUG=1).
void set_frames(bool on);

// Captures the calling thread's frame, where frames are kept, for the nodes made in its scope.
struct FrameScope {
  FrameScope();
  ~FrameScope();
  FrameScope(const FrameScope&) = delete;
  FrameScope& operator=(const FrameScope&) = delete;
};
const std::string* recorded_frame();

// Frames whose file starts with one of these are skipped.
void add_skipped_prefix(std::string prefix);

}  // namespace torch_xla
