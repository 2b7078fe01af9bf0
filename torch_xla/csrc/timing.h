// How long stages inside the recorder take, for the metrics.
#pragma once
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace torch_xla {

class Timing {
 public:
  // One call in `every`, a power of two, is timed.
  Timing(std::string name, uint64_t every) : name(std::move(name)), every(every) {}
  Timing(const Timing&) = delete;
  Timing& operator=(const Timing&) = delete;

  // Counts a call; whether it is one that is timed.
  bool begin() { return (calls_.fetch_add(1, std::memory_order_relaxed) & (every - 1)) == 0; }
  void end(std::chrono::steady_clock::time_point start);

  struct Snapshot {
    uint64_t calls;
    double seconds;                                  // of all calls, estimated from those that were timed
    std::vector<std::pair<double, double>> samples;  // the latest: seconds since the epoch, duration
  };
  Snapshot snapshot() const;

  const std::string name;
  const uint64_t every;

 private:
  std::atomic<uint64_t> calls_{0};
  mutable std::mutex lock_;
  uint64_t timed_ = 0;
  double seconds_ = 0;
  std::array<std::pair<double, double>, 256> ring_;
};

class Timed {
 public:
  explicit Timed(Timing& timing) : timing_(timing.begin() ? &timing : nullptr) {
    if (timing_ != nullptr) {
      start_ = std::chrono::steady_clock::now();
    }
  }
  ~Timed() {
    if (timing_ != nullptr) {
      timing_->end(start_);
    }
  }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  Timing* const timing_;
  std::chrono::steady_clock::time_point start_;
};

// An operator being recorded; the inputs of a run being gathered; its results being handed out.
Timing& recording_time();
Timing& gathering_time();
Timing& attaching_time();
std::array<Timing*, 3> timings();

}  // namespace torch_xla
