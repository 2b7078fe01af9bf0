// Memory of what comes and goes with each step, small objects by the hundred and the lists of them: what one step frees
// the next takes again, in the reverse order, still in the processor's cache. malloc would join the pieces and cut them
// anew, and does so with all small pieces of the process whenever it is asked for more than 1 KB.
#pragma once
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

#include "base/fork.h"

namespace torch_xla {

// A free piece of memory holds the next one.
struct FreePiece {
  FreePiece* next;
};

// Held for a few instructions, by any thread.
class SpinLock {
 public:
  void lock() {
    while (busy_.test_and_set(std::memory_order_acquire)) {
    }
  }
  void unlock() { busy_.clear(std::memory_order_release); }

 private:
  std::atomic_flag busy_;
};
using PoolLock = ForkSafe<SpinLock, LockOrder::Pool>;

// A base class; from any thread.
template <typename T>
class Pooled {
 public:
  static void* operator new(size_t size) {
    {
      const std::lock_guard<SpinLock> guard(busy_);
      if (free_ != nullptr) {
        --count_;
        return std::exchange(free_, free_->next);
      }
    }
    return ::operator new(size, std::align_val_t(alignof(T)));
  }
  static void operator delete(void* object) {
    {
      const std::lock_guard<SpinLock> guard(busy_);
      if (count_ < kMost) {
        ++count_;
        free_ = new (object) FreePiece{free_};
        return;
      }
    }
    ::operator delete(object, std::align_val_t(alignof(T)));
  }

 private:
  static constexpr size_t kMost = 8192;  // of a large graph's objects most go back to malloc
  static inline PoolLock busy_;
  static inline FreePiece* free_ = nullptr;
  static inline size_t count_ = 0;
};

// Blocks of powers of two, for lists; from any thread.
class Blocks {
 public:
  static void* take(size_t size) {
    const auto kind = kind_of(size);
    if (kind >= kKinds) {
      return ::operator new(size);
    }
    {
      const std::lock_guard<SpinLock> guard(busy_);
      auto& [free, count] = lists_[kind];
      if (free != nullptr) {
        --count;
        return std::exchange(free, free->next);
      }
    }
    return ::operator new(kLeast << kind);
  }
  static void give(void* block, size_t size) {
    const auto kind = kind_of(size);
    if (kind < kKinds) {
      const std::lock_guard<SpinLock> guard(busy_);
      auto& [free, count] = lists_[kind];
      if (count < kMost) {
        ++count;
        free = new (block) FreePiece{free};
        return;
      }
    }
    ::operator delete(block);
  }

 private:
  static constexpr size_t kLeast = 64;
  static constexpr size_t kKinds = 12;  // to 128 KB, above which malloc takes pages of their own
  static constexpr size_t kMost = 16;
  struct List {
    FreePiece* free;
    size_t count;
  };
  static size_t kind_of(size_t size) { return size <= kLeast ? 0 : std::bit_width((size - 1) / kLeast); }
  static inline PoolLock busy_;
  static inline std::array<List, kKinds> lists_{};
};

template <typename T>
struct BlockAllocator {
  using value_type = T;
  BlockAllocator() = default;
  template <typename U>
  BlockAllocator(const BlockAllocator<U>&) {}
  T* allocate(size_t n) { return static_cast<T*>(Blocks::take(n * sizeof(T))); }
  void deallocate(T* block, size_t n) { Blocks::give(block, n * sizeof(T)); }
  friend bool operator==(const BlockAllocator&, const BlockAllocator&) { return true; }
};

// A list that a step makes and frees.
template <typename T>
using Vector = std::vector<T, BlockAllocator<T>>;

}  // namespace torch_xla
