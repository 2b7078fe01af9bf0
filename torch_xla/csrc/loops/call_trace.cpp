#include "loops/call_trace.h"

#include <algorithm>
#include <array>
#include <functional>
#include <iterator>
#include <utility>

#include "base/python_hooks.h"
#include "tensor/placeholder.h"

namespace torch_xla {

namespace {

constexpr size_t kLoops = 4;           // loops that are remembered
constexpr size_t kInnerSegments = 16;  // a barrier after fewer makes them a part of the program's own loop
constexpr size_t kReads = 4;           // values that are read in a step without a graph of their own each
constexpr double kNextLook = 1.25;     // of the window's length
// Changes of the recording thread after which a trace is not searched any more; one more is allowed for so many
// segments.
constexpr size_t kChanges = 4;
constexpr size_t kSegmentsForChange = 8;

bool tracing = true;
TraceLimits limits;
thread_local c10::DeviceIndex loop_work_device = -1;
thread_local bool in_loop_work = false;

}  // namespace

Loop::Loop(const TracedCall* first, size_t calls, Repeated what) : field_(what), fallback_(calls + 1) {
  std::transform(first, first + calls, std::back_inserter(signatures_), std::mem_fn(what));
  for (size_t i = 1, k = 0; i < signatures_.size(); ++i) {
    while (k > 0 && signatures_[i] != signatures_[k]) {
      k = fallback_[k];
    }
    k += signatures_[i] == signatures_[k] ? 1 : 0;
    fallback_[i + 1] = static_cast<uint32_t>(k);
  }
}

bool Loop::follow(const TracedCall& call) {
  if (signatures_[matched_] != call.*field_) {
    return false;
  }
  matched_ = matched_ + 1 == size() ? 0 : matched_ + 1;
  return true;
}

bool Loop::search(const TracedCall& call) {
  const auto signature = call.*field_;
  while (matched_ > 0 && signatures_[matched_] != signature) {
    matched_ = fallback_[matched_];
  }
  matched_ += signatures_[matched_] == signature ? 1 : 0;
  if (matched_ < size()) {
    return false;
  }
  matched_ = 0;
  return true;
}

void CallTrace::restart() {
  window_.clear();
  for (auto& loop : loops_) {
    loop.restart();
  }
}

// What two threads record has no order that comes again: a loop is one thread's. One that only now and then has another
// come between is found again.
void CallTrace::change_thread() {
  changes_ += thread_ != nullptr ? 1 : 0;
  mixed_ = changes_ > kChanges + segments_ / kSegmentsForChange;
  thread_ = &loop_work_device;
  active_ = nullptr;
  restart();
}

bool CallTrace::note(const TracedCall& call) {
  if (thread_ != &loop_work_device && !call.backward) {  // a backward pass may run in a thread of autograd's
    change_thread();
  }
  as_before_ = as_before_ && calls_ < step_.size() && step_[calls_] == call.signature;
  ++calls_;
  if (mixed_) {
    return false;
  }
  if (active_ != nullptr) {
    const bool first = active_->matched() == 0;
    if (active_->follow(call)) {
      if (first) {
        starts_.push_back(call.sequence);
        ++segments_;
        read_before_ = std::exchange(reads_, 0) != 0;
      }
      return first && starts_.size() > 1;
    }
    active_ = nullptr;  // the segments so far stay: they are cut where their programs are known
    restart();
  }
  if (window_.empty()) {
    first_storage_ = next_storage_id();
    next_look_ = std::max(limits.first_look, 2 * largest_);
  }
  window_.push_back(call);
  if (search(call)) {
    return starts_.size() > 1;
  }
  if (window_.size() < next_look_) {
    return false;
  }
  next_look_ = static_cast<size_t>(static_cast<double>(next_look_) * kNextLook);
  return true;
}

// Whether a loop that was found before goes on with this call.
bool CallTrace::search(const TracedCall& call) {
  for (auto& loop : loops_) {
    if (loop.search(call) && loop.size() <= window_.size()) {
      starts_.push_back(window_[window_.size() - loop.size()].sequence);
      restart();
      active_ = &loop;
      return true;
    }
  }
  return false;
}

void CallTrace::add_loop(Loop loop, const std::vector<size_t>& starts) {
  for (const auto i : starts) {
    starts_.push_back(window_[i].sequence);
  }
  const auto since = window_.size() - starts.back();
  loops_.push_front(std::move(loop));
  if (loops_.size() > kLoops) {
    loops_.pop_back();
  }
  restart();
  active_ = &loops_.front();
  active_->set_matched(since % active_->size());
}

std::vector<uint64_t> CallTrace::ends() const {
  std::vector<uint64_t> sequences(starts_.begin(), starts_.end());
  if (active_ != nullptr && active_->matched() == 0 && !starts_.empty()) {  // complete, before the next has begun
    sequences.push_back(node_sequence());
  }
  return sequences;
}

void CallTrace::drop_ends(uint64_t until) {
  while (!starts_.empty() && starts_.front() <= until) {
    starts_.pop_front();
    cut_ = true;
  }
}

void CallTrace::barrier() {
  const bool inner = active_ == nullptr || calls_ < kInnerSegments * active_->size();
  // A loop that grows would be another graph each time if its whole step were cut at once.
  const bool grew = std::any_of(loops_.begin(), loops_.end(), std::mem_fn(&Loop::growing));
  if (inner && !grew) {
    largest_ = std::max(largest_, calls_);
  }
  step_.clear();
  if (reads_ == 0 && window_.size() == calls_) {
    std::transform(window_.begin(), window_.end(), std::back_inserter(step_), std::mem_fn(&TracedCall::signature));
  }
  as_before_ = !step_.empty();
  calls_ = reads_ = changes_ = segments_ = 0;
  mixed_ = false;
  active_ = nullptr;
  loops_.clear();
  starts_.clear();
  cut_ = false;
  restart();
}

void CallTrace::read(size_t nodes) {
  ++reads_;
  if (active_ == nullptr && 2 * nodes >= calls_) {
    barrier();
  }
}

bool CallTrace::expects_whole_step() {
  const bool now_and_then = active_ != nullptr ? !read_before_ : as_before_;
  if (!now_and_then || reads_ >= kReads) {
    return false;
  }
  ++reads_;
  return true;
}

bool CallTrace::no_loop_found() {
  if (window_.size() < kLongest) {
    return false;
  }
  restart();
  return true;
}

CallTrace& call_trace_of(c10::DeviceIndex device) {
  static auto* const traces = new std::array<CallTrace, kMaxDevices>;
  return (*traces)[device];
}

void note_call(c10::DeviceIndex device, const TracedCall& call) {
  if (!tracing || any_placeholders() || eager()) {
    return;
  }
  if (call_trace_of(device).note(call) && !in_loop_work) {
    loop_work_device = device;
  }
}

bool traces_calls() { return tracing; }
const TraceLimits& trace_limits() { return limits; }

void trace_calls(bool follow, const TraceLimits& chosen) {
  const RecorderLock lock;
  tracing = follow;
  limits = chosen;
  for (c10::DeviceIndex device = 0; static_cast<size_t>(device) < kMaxDevices; ++device) {
    call_trace_of(device) = {};
  }
}

bool has_loop_work() { return loop_work_device >= 0; }

void run_loop_work() {
  const auto device = std::exchange(loop_work_device, -1);
  struct InLoopWork {
    InLoopWork() { in_loop_work = true; }
    ~InLoopWork() { in_loop_work = false; }
  } const guard;
  cut_loop(device);
}

}  // namespace torch_xla
