#include "base/fork.h"

#include <pthread.h>

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

namespace torch_xla {

namespace {

struct All {
  std::mutex mutex;
  std::vector<std::pair<LockOrder, ForkLock>> locks;  // in order
};
All& all() {
  static auto* const a = new All();
  return *a;
}

void take_all() {
  all().mutex.lock();
  for (const auto& [order, entry] : all().locks) {
    entry.take(entry.lock);
  }
}

void leave_all() {
  for (auto entry = all().locks.rbegin(); entry != all().locks.rend(); ++entry) {
    entry->second.leave(entry->second.lock);
  }
  all().mutex.unlock();
}

void renew_all() {
  for (const auto& [order, entry] : all().locks) {
    entry.renew(entry.lock);
  }
  new (&all().mutex) std::mutex();
}

}  // namespace

void keep_over_forks(LockOrder order, const ForkLock& lock) {
  static const int registered = pthread_atfork(&take_all, &leave_all, &renew_all);
  (void)registered;
  auto& [mutex, locks] = all();
  const std::lock_guard<std::mutex> guard(mutex);
  const auto later = [](LockOrder order_of_new, const auto& entry) { return order_of_new < entry.first; };
  locks.emplace(std::upper_bound(locks.begin(), locks.end(), order, later), order, lock);
}

}  // namespace torch_xla
