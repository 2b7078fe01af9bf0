#include "base/metric.h"

#include <functional>
#include <map>

#include "base/fork.h"

namespace torch_xla {

namespace {

constexpr size_t kSamples = 1024;
// A clock costs some 25 ns, an operator some 1,500; so most of them are only counted.
constexpr uint64_t kOneIn = 64;

struct Registry {
  ForkSafe<std::mutex, LockOrder::Metrics> lock;
  std::map<std::string, Metric, std::less<>> metrics;  // never erased: others hold references
};

Registry& registry() {
  static auto* const all = new Registry;
  return *all;
}

Metric& find(std::string_view name, uint64_t every) {
  auto& [lock, metrics] = registry();
  const std::lock_guard<std::mutex> guard(lock);
  const auto it = metrics.find(name);
  return it != metrics.end() ? it->second : metrics.try_emplace(std::string(name), every).first->second;
}

}  // namespace

void Metric::sample(double value) {
  const auto when = std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  if (ring_.size() < kSamples) {
    ring_.emplace_back(when, value);
  } else {
    ring_[sampled_ % kSamples] = {when, value};
  }
  ++sampled_;
  total_ += value;
}

void Metric::add(double value, std::string_view unit) {
  const std::lock_guard<std::mutex> guard(lock_);
  if (count_.fetch_add(1, std::memory_order_relaxed) == 0) {
    unit_ = unit;
  }
  sample(value);
}

void Metric::amend(double by) {
  const std::lock_guard<std::mutex> guard(lock_);
  if (sampled_ > 0) {
    ring_[(sampled_ - 1) % kSamples].second += by;
    total_ += by;
  }
}

void Metric::clear() {
  const std::lock_guard<std::mutex> guard(lock_);
  count_ = 0;
  sampled_ = 0;
  total_ = 0;
  ring_.clear();
}

void Metric::end(std::chrono::steady_clock::time_point start) {
  const auto took = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const std::lock_guard<std::mutex> guard(lock_);
  sample(took);
}

Metric::Snapshot Metric::snapshot() const {
  const std::lock_guard<std::mutex> guard(lock_);
  Snapshot result{unit_, count_.load(std::memory_order_relaxed), every, total_, {}};
  if (every > 1 && sampled_ > 0) {
    result.total *= static_cast<double>(result.count) / static_cast<double>(sampled_);
  }
  for (auto i = sampled_ - ring_.size(); i < sampled_; ++i) {
    result.samples.push_back(ring_[i % kSamples]);
  }
  return result;
}

Metric& metric(std::string_view name) { return find(name, 1); }

std::optional<Metric::Snapshot> snapshot_of(std::string_view name) {
  auto& [lock, all] = registry();
  const std::lock_guard<std::mutex> guard(lock);
  const auto it = all.find(name);
  if (it == all.end() || !it->second.used()) {
    return std::nullopt;
  }
  return it->second.snapshot();
}

std::vector<std::string> metric_names() {
  auto& [lock, all] = registry();
  const std::lock_guard<std::mutex> guard(lock);
  std::vector<std::string> names;
  for (const auto& [name, metric] : all) {
    if (metric.used()) {
      names.push_back(name);
    }
  }
  return names;
}

void clear_metrics() {
  auto& [lock, all] = registry();
  const std::lock_guard<std::mutex> guard(lock);
  for (auto& [name, metric] : all) {
    metric.clear();
  }
}

Metric& recording_time() {
  static auto& metric = find("LazyTracing", kOneIn);
  return metric;
}

Metric& gathering_time() {
  static auto& metric = find("UnwrapXlaData", 1);
  return metric;
}

Metric& attaching_time() {
  static auto& metric = find("WrapXlaData", 1);
  return metric;
}

}  // namespace torch_xla
