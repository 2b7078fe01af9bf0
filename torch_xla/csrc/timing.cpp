#include "timing.h"

#include <algorithm>

namespace torch_xla {

namespace {
// A clock costs some 25 ns, an operator some 1,500; so most of them are only counted.
constexpr uint64_t kOneIn = 64;
}  // namespace

void Timing::end(std::chrono::steady_clock::time_point start) {
  const auto took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const auto when = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  const std::lock_guard<std::mutex> guard(lock_);
  ring_[timed_ % ring_.size()] = {when, took};
  ++timed_;
  seconds_ += took;
}

Timing::Snapshot Timing::snapshot() const {
  const std::lock_guard<std::mutex> guard(lock_);
  Snapshot found{calls_.load(std::memory_order_relaxed), 0, {}};
  if (timed_ > 0) {
    found.seconds = every == 1 ? seconds_ : seconds_ / static_cast<double>(timed_) * static_cast<double>(found.calls);
  }
  const auto kept = std::min<uint64_t>(timed_, ring_.size());
  for (auto i = timed_ - kept; i < timed_; ++i) {
    found.samples.push_back(ring_[i % ring_.size()]);
  }
  return found;
}

Timing& recording_time() {
  static auto* const timing = new Timing("LazyTracing", kOneIn);
  return *timing;
}

Timing& gathering_time() {
  static auto* const timing = new Timing("UnwrapXlaData", 1);
  return *timing;
}

Timing& attaching_time() {
  static auto* const timing = new Timing("WrapXlaData", 1);
  return *timing;
}

std::array<Timing*, 3> timings() { return {&recording_time(), &gathering_time(), &attaching_time()}; }

}  // namespace torch_xla
