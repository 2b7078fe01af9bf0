#include "cut/loop_detection.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "cut/reach.h"
#include "ir/op_info.h"
#include "loops/call_trace.h"

namespace torch_xla {

namespace {

// Pieces that must have been seen, and the part of the window that they must cover: the steps between which gradients
// are accumulated repeat too, but the optimizer's comes soon.
constexpr double kSegments = 2.25;
constexpr double kGrowingSegments = 3.25;  // a loop that does not grow is seen to repeat by then
constexpr size_t kWindowPart = 2;
// Values that a repetition may leave behind, or use up, for good: a list of losses is a loop, the saved activations of
// a forward pass are not.
constexpr size_t kLeftBehind = 8;
constexpr size_t kLeftBehindPart = 10;  // of the calls, one in so many

size_t segment_length(size_t period) {
  const auto least = trace_limits().least_segment;
  return (least + period - 1) / period * period;
}

// The smallest period with which the latest calls repeat often enough, and how many calls repeat with it.
struct Period {
  size_t calls = 0;
  size_t covered = 0;
};
Period find_period(const std::vector<TracedCall>& calls, Repeated what, double segments) {
  const size_t n = calls.size();
  const auto at = [&](size_t i) { return calls[n - 1 - i].*what; };  // the latest first
  std::vector<size_t> common(n, 0);  // with the end of the trace, from so far back on (the Z function)
  for (size_t i = 1, left = 0, right = 0; i < n; ++i) {
    auto& z = common[i];
    z = i < right ? std::min(right - i, common[i - left]) : 0;
    while (i + z < n && at(z) == at(i + z)) {
      ++z;
    }
    if (i + z > right) {
      left = i;
      right = i + z;
    }
  }
  for (size_t p = 1; p < n / 2; ++p) {
    const auto covered = p + common[p];
    if (covered * kWindowPart >= n &&
        static_cast<double>(covered) >= segments * static_cast<double>(segment_length(p))) {
      return {p, covered};
    }
  }
  return {};
}

// Whether each of the latest segments differs from the one before. Those of a loop that only begins in another way do
// not.
bool keeps_changing(const std::vector<TracedCall>& calls, size_t period) {
  const auto segment = static_cast<long>(segment_length(period));
  const auto changes = [&](auto end) {
    return !std::equal(end - segment, end, end - segment - static_cast<long>(period),
                       [](const TracedCall& a, const TracedCall& b) { return a.signature == b.signature; });
  };
  return changes(calls.end()) && changes(calls.end() - segment);
}

// Layers repeat as steps do, but each reads weights of its own.
bool reads_the_same(const std::vector<TracedCall>& calls, size_t period) {
  size_t equal = 0;
  size_t differ = 0;
  for (size_t i = calls.size() - period; i < calls.size(); ++i) {
    const auto& now = calls[i].reads;
    const auto& before = calls[i - period].reads;
    if (now.last != 0 && before.last != 0) {
      ++(now.first == before.first || now.last == before.last ? equal : differ);
    }
  }
  return differ <= equal;
}

// Whether a repetition is a part of a forward pass whose backward pass is still to come, or never will.
bool waits_for_backward(const std::vector<TracedCall>& calls, size_t period) {
  const auto last = calls.end() - static_cast<long>(period);
  return std::any_of(last, calls.end(), [](const TracedCall& call) { return call.history; }) &&
         std::none_of(last, calls.end(), [](const TracedCall& call) { return call.backward; });
}

// Where in a period, of calls from `first` on, the fewest values cross, if the program could have a barrier there: no
// body of a loop ends within a backward pass, whose cells or layers may repeat as steps do.
std::optional<size_t> find_phase(const std::vector<TracedCall>& calls, size_t first, size_t period,
                                 const std::vector<size_t>& live_counts) {
  std::optional<size_t> best;
  for (size_t i = period; i < 2 * period; ++i) {  // before the first repetition there may have been nothing
    const bool within = calls[first + i].backward && calls[first + i - 1].backward;
    if (!within && (!best || live_counts[i] < live_counts[*best])) {
      best = i;
    }
  }
  return best;
}

// What is pending, seen from the calls of the window's repetition.
class LiveRanges {
 public:
  LiveRanges(c10::DeviceIndex device, std::vector<uint64_t> starts);
  // Per call: how many values from before it are needed later.
  const std::vector<size_t>& live_counts() const { return live_counts_; }
  // How many values that came with the first calls are still some tensor's, and how many of these a later repetition
  // reads; one begins at each `phase` plus a multiple of the period.
  struct Survivors {
    size_t values = 0;
    size_t carried = 0;
  };
  Survivors survivors(size_t calls, size_t phase, size_t period) const;
  // The line of the first node after a call.
  Frame frame_at(size_t call) const;

 private:
  // The first call that begins after a node.
  size_t after(const Node& node) const {
    return static_cast<size_t>(std::upper_bound(starts_.begin(), starts_.end(), node.sequence) - starts_.begin());
  }

  const std::vector<uint64_t> starts_;
  Vector<Value> roots_;
  Vector<Node*> nodes_;
  Vector<bool> is_root_;      // by nodes: whether a tensor has a result
  Vector<size_t> last_read_;  // by nodes: the call after which they are read for the last time
  std::vector<size_t> live_counts_;
};

LiveRanges::LiveRanges(c10::DeviceIndex device, std::vector<uint64_t> starts) : starts_(std::move(starts)) {
  // What keeps a collective pending, its last result, is no value of the program's.
  const auto& collective = op_info("xla::collective", "");
  const auto is_mark = [&](const Value& v) {
    return v.node->op == &collective && v.index + 1 == v.node->outs->metas.size();
  };
  next_epoch();
  for_each_storage(device, [&](Storage& s) {
    resolve(s.value);
    if (!s.value.node->leaf() && !is_mark(s.value)) {
      roots_.push_back(s.value);
    }
  });
  nodes_ = reach(roots_);
  sort_by_sequence(nodes_);
  for (uint32_t i = 0; i < nodes_.size(); ++i) {
    nodes_[i]->slot = i;
  }
  const auto n = starts_.size();
  last_read_.assign(nodes_.size(), 0);
  for (const auto* node : nodes_) {
    const auto reader = after(*node);
    for (const auto& input : node->inputs) {
      if (!input.node->leaf()) {
        auto& last = last_read_[input.node->slot];
        last = std::max(last, reader);
      }
    }
  }
  is_root_.assign(nodes_.size(), false);
  for (const auto& root : roots_) {
    is_root_[root.node->slot] = true;
  }
  std::vector<int64_t> change(n + 1, 0);
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const auto born = after(*nodes_[i]);
    const auto last = is_root_[i] ? n : last_read_[i];
    if (last > born) {
      ++change[born];
      --change[last];
    }
  }
  int64_t now = 0;
  for (size_t i = 0; i < n; ++i) {
    now += change[i];
    live_counts_.push_back(static_cast<size_t>(now));
  }
}

LiveRanges::Survivors LiveRanges::survivors(size_t calls, size_t phase, size_t period) const {
  Survivors survivors;
  const auto repetition = [&](size_t call) { return (call + period - phase) / period; };
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const auto born = after(*nodes_[i]);  // with the call before that
    if (is_root_[i] && born > 0 && born <= calls) {
      ++survivors.values;
      survivors.carried += last_read_[i] > 0 && repetition(last_read_[i] - 1) > repetition(born - 1) ? 1 : 0;
    }
  }
  return survivors;
}

Frame LiveRanges::frame_at(size_t call) const {
  const auto it = std::find_if(nodes_.begin(), nodes_.end(), [&](const Node* node) {
    return node->sequence >= starts_[call] && node->frame != nullptr;
  });
  return it != nodes_.end() ? (*it)->frame : nullptr;
}

}  // namespace

std::optional<DetectedLoop> detect_loop(c10::DeviceIndex device, bool growing, bool follow) {
  const RecorderLock lock;
  auto& trace = call_trace_of(device);
  const auto& calls = trace.window();
  const auto what = growing ? &TracedCall::kind : &TracedCall::signature;
  const auto period = find_period(calls, what, growing ? kGrowingSegments : kSegments);
  if (period.calls == 0 || !reads_the_same(calls, period.calls) || (growing && !keeps_changing(calls, period.calls))) {
    return {};
  }
  const auto first = calls.size() - period.covered;
  const auto segment = segment_length(period.calls);
  std::vector<uint64_t> sequences;
  for (auto i = first; i < calls.size(); ++i) {
    sequences.push_back(calls[i].sequence);
  }
  const LiveRanges live_ranges(device, std::move(sequences));
  const auto& live_counts = live_ranges.live_counts();
  const auto best_phase = find_phase(calls, first, period.calls, live_counts);
  if (!best_phase) {
    return {};
  }
  const auto phase = *best_phase - period.calls;
  const auto later = live_counts[phase + segment];
  const auto used_up = live_counts[phase] - std::min(live_counts[phase], later);
  const auto survivors = live_ranges.survivors(segment, phase, period.calls);
  const auto imbalance = std::max(survivors.values, used_up);
  if (imbalance * kLeftBehindPart > segment || imbalance * period.calls > kLeftBehind * segment) {
    return {};
  }
  if (survivors.carried > 0 && waits_for_backward(calls, period.calls)) {
    return {};
  }
  std::vector<size_t> starts;
  for (auto i = first + phase; i < calls.size(); i += segment) {
    starts.push_back(i);
  }
  const DetectedLoop loop{segment, later, live_ranges.frame_at(phase)};
  if (follow) {
    trace.add_loop(Loop(&calls[first + phase], segment, what), starts);
  }
  return loop;
}

}  // namespace torch_xla
