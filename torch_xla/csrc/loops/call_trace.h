// The trace of the calls recorded on a device, and the loops in it: a program without barriers is cut where its loop
// repeats. Here known loops are followed, call by call; `cut/loop_detection.h` finds them. Everything is decided
// from what was recorded, never from time. All functions want the recorder's lock, but for the last three.
#pragma once
#include <cstdint>
#include <deque>
#include <vector>

#include "tensor/storage.h"

namespace torch_xla {

// The oldest and the newest of some storages.
struct StorageRange {
  uint64_t first = ~uint64_t{0};
  uint64_t last = 0;
  void add(uint64_t id) {
    first = id < first ? id : first;
    last = id > last ? id : last;
  }
};

struct TracedCall {
  uint64_t signature;  // what is called on what kind of thing; numbers that may vary are no part of it
  uint64_t kind;       // the same without sizes and constants
  uint64_t sequence;   // the node sequence before it
  StorageRange reads;  // of the storages that it reads, those that were there before the window
  bool backward;       // it is part of a backward pass
  bool history;        // it reads a value from which one would go back
};

// What a loop compares: the signatures of its calls, or their kinds alone where its tensors grow.
using Repeated = uint64_t TracedCall::*;

// The calls of a segment: one turn of the loop, or as many turns as are worth a program.
class Loop {
 public:
  Loop(const TracedCall* first, size_t calls, Repeated what);
  size_t size() const { return signatures_.size(); }
  bool growing() const { return field_ == &TracedCall::kind; }
  // How many of the latest calls are the first ones of a segment.
  size_t matched() const { return matched_; }
  // Takes the next call; whether it goes on as the loop does.
  bool follow(const TracedCall& call);
  // Takes the next call of a trace that may be something else; whether a segment is complete with it.
  bool search(const TracedCall& call);
  void restart() { matched_ = 0; }
  void set_matched(size_t calls) { matched_ = calls; }

 private:
  Repeated field_;
  std::vector<uint64_t> signatures_;
  std::vector<uint32_t> fallback_;  // by calls that match: how many of them do so further on
  size_t matched_ = 0;
};

class CallTrace {
 public:
  // Gives whether there is work for `run_loop_work`.
  bool note(const TracedCall& call);
  // Storages with smaller ids were there before the window.
  uint64_t first_storage() const { return first_storage_; }
  const std::vector<TracedCall>& window() const { return window_; }
  // Follows a new loop, whose segments begin at these calls of the window.
  void add_loop(Loop loop, const std::vector<size_t>& starts);
  bool looping() const { return active_ != nullptr; }
  // Calls since the latest barrier.
  size_t calls() const { return calls_; }
  // Node sequences at which complete segments end that are not cut yet, the oldest first.
  std::vector<uint64_t> ends() const;
  void drop_ends(uint64_t until);
  // Whether segments were cut since the latest barrier: a value that is read now is a loop's.
  bool was_cut() const { return cut_; }
  // All was computed where the program asked for it.
  void barrier();
  // A part was, of so many nodes, because a value was read.
  void read(size_t nodes);
  // Whether the whole step, without the read that is about to happen, would be a graph that is known: the calls since
  // the barrier are those of the step before, in which nothing was read. Counts as a read.
  bool expects_whole_step();
  // Takes note that the window shows no loop; whether it is so long that the user should be told.
  bool no_loop_found();

  static constexpr size_t kLongest = 200'000;

 private:
  void restart();
  void change_thread();
  bool search(const TracedCall& call);

  std::vector<TracedCall> window_;
  size_t next_look_ = 0;
  size_t calls_ = 0;    // since the latest barrier
  size_t largest_ = 0;  // of the graphs between barriers, in calls
  uint64_t first_storage_ = 0;
  const void* thread_ = nullptr;
  // Since the latest barrier:
  size_t changes_ = 0;      // of the thread
  size_t segments_ = 0;     // that were followed
  bool mixed_ = false;      // threads record in turns: what is pending has no order that would come again
  std::deque<Loop> loops_;  // the latest first
  Loop* active_ = nullptr;
  std::deque<uint64_t> starts_;  // of segments, not cut yet
  std::vector<uint64_t> step_;   // what the latest barrier ended, where nothing was read in it
  bool as_before_ = false;       // the calls since it are those of `step_`
  bool read_before_ = false;     // a value was read in the latest segment
  size_t reads_ = 0;             // since the latest barrier, or in this segment
  bool cut_ = false;             // segments were cut since the latest barrier
};

CallTrace& call_trace_of(c10::DeviceIndex device);
// Takes notice of a call that is about to be placed.
void note_call(c10::DeviceIndex device, const TracedCall& call);
bool traces_calls();

struct TraceLimits {
  size_t first_look = 512;     // calls before the window is looked at
  size_t least_segment = 128;  // a program of fewer calls is not worth its start
};
const TraceLimits& trace_limits();

void trace_calls(bool on, const TraceLimits& limits);
// Whether the calling thread noted a call with which there is something to look at or to cut; `run_loop_work` has it
// done. Wants no lock, and may take the GIL.
bool has_loop_work();
void run_loop_work();

}  // namespace torch_xla
