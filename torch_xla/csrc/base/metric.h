// Measured quantities of the process: durations, bytes, counts.
#pragma once
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/fork.h"

namespace torch_xla {

class Metric {
 public:
  // Of what is only timed one call in `every`, a power of two, is.
  explicit Metric(uint64_t every = 1) : every(every) {}
  Metric(const Metric&) = delete;
  Metric& operator=(const Metric&) = delete;

  void add(double value, std::string_view unit);
  // Adds to the latest sample.
  void amend(double by);
  void clear();

  // Counts a call; whether it is one that is timed.
  bool begin() { return (count_.fetch_add(1, std::memory_order_relaxed) & (every - 1)) == 0; }
  void end(std::chrono::steady_clock::time_point start);

  struct Snapshot {
    std::string unit;
    uint64_t count;
    uint64_t every;
    double total;                                    // of all, estimated where only some are timed
    std::vector<std::pair<double, double>> samples;  // the latest: seconds since the epoch, value
  };
  Snapshot snapshot() const;
  bool used() const { return count_.load(std::memory_order_relaxed) > 0; }

  const uint64_t every;

 private:
  void sample(double value);

  std::atomic<uint64_t> count_{0};
  mutable ForkSafe<std::mutex, LockOrder::Metric> lock_;
  std::string unit_ = "seconds";
  uint64_t sampled_ = 0;
  double total_ = 0;
  std::vector<std::pair<double, double>> ring_;
};

class Timed {
 public:
  explicit Timed(Metric& metric) : metric_(metric.begin() ? &metric : nullptr) {
    if (metric_ != nullptr) {
      start_ = std::chrono::steady_clock::now();
    }
  }
  ~Timed() {
    if (metric_ != nullptr) {
      metric_->end(start_);
    }
  }
  Timed(const Timed&) = delete;
  Timed& operator=(const Timed&) = delete;

 private:
  Metric* const metric_;
  std::chrono::steady_clock::time_point start_;
};

// The metric of that name, which is made if there is none.
Metric& metric(std::string_view name);
// What it has, if it has samples.
std::optional<Metric::Snapshot> snapshot_of(std::string_view name);
// Of those that have samples, sorted.
std::vector<std::string> metric_names();
void clear_metrics();

// An operator being recorded; the inputs of a run being gathered; its results being handed out.
Metric& recording_time();
Metric& gathering_time();
Metric& attaching_time();

}  // namespace torch_xla
