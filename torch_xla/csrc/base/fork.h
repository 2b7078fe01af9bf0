// Locks that are free in a forked child, such as a loader's worker, whatever other threads of the parent held: the
// child frees what it inherited, and may record. A fork takes all of them first, in the order in which they nest.
#pragma once
#include <cstdint>
#include <new>

namespace torch_xla {

// A thread that has one of these takes only later ones. None is held while waiting for the GIL, which a fork has.
enum class LockOrder : uint8_t {
  Recorder,
  Storages,
  Random,
  Scopes,
  Selected,
  Refusals,
  Operators,
  Released,
  Metrics,
  Metric,
  Pool,
};

struct ForkLock {
  void* lock;
  void (*take)(void*);
  void (*leave)(void*);
  // In the child, where it counts as taken by a thread that is not there: some locks know their thread.
  void (*renew)(void*);
};
void keep_over_forks(LockOrder order, const ForkLock& lock);

// A lock that lives as long as the process.
template <class Lock, LockOrder Order>
class ForkSafe : public Lock {
 public:
  ForkSafe() {
    keep_over_forks(Order,
                    {static_cast<Lock*>(this), [](void* lock) { static_cast<Lock*>(lock)->lock(); },
                     [](void* lock) { static_cast<Lock*>(lock)->unlock(); }, [](void* lock) { new (lock) Lock(); }});
  }
};

}  // namespace torch_xla
