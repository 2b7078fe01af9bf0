// The user's own line: the innermost Python frame outside PyTorch and this package.
#pragma once
#include <string>
#include <utility>

#include "base/metric.h"

namespace torch_xla {

// "file.py:12 in train", one object per line for the life of the process; null where no Python runs.
using Frame = const std::string*;

// Walks the calling thread's stack. Takes the GIL for instructions it sees for the first time.
Frame user_frame();
// The same for several frames, innermost first, joined by " < ".
Frame user_frames(int lines);
// The user's innermost frame of any thread, and whether it was called by PyTorch's DataLoader. Takes the GIL.
std::pair<Frame, bool> thread_position(unsigned long thread);

// How many frames of every recorded operator are kept; 0 for none.
void set_frame_depth(int lines);

// The scope of one recorded call: finds the calling thread's frame for the nodes made in it, and times it.
struct FrameScope {
  FrameScope();
  ~FrameScope();

  Timed timed{recording_time()};
  FrameScope(const FrameScope&) = delete;
  FrameScope& operator=(const FrameScope&) = delete;
};
Frame recorded_frame();

// The scope of several calls that are recorded from one place in Python: its line is looked for once.
class LineScope {
 public:
  LineScope();
  ~LineScope();
  LineScope(const LineScope&) = delete;
  LineScope& operator=(const LineScope&) = delete;

 private:
  std::pair<const void*, Frame> outer_;
};

// Frames whose file starts with one of these are skipped.
void add_skipped_prefix(std::string prefix);

}  // namespace torch_xla
