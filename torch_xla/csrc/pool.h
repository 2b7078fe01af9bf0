// Memory of small objects that come and go by the hundred with each step: what one step frees the next takes again, in
// the reverse order, still in the processor's cache. malloc would join the pieces and cut them anew.
#pragma once
#include <atomic>
#include <cstddef>
#include <new>
#include <utility>

namespace torch_xla {

// A base class; from any thread.
template <typename T>
class Pooled {
 public:
  static void* operator new(size_t size) {
    {
      const Guard guard;
      if (free_ != nullptr) {
        --count_;
        return std::exchange(free_, free_->next);
      }
    }
    return ::operator new(size, std::align_val_t(alignof(T)));
  }
  static void operator delete(void* object) {
    {
      const Guard guard;
      if (count_ < kMost) {
        ++count_;
        free_ = new (object) Free{free_};
        return;
      }
    }
    ::operator delete(object, std::align_val_t(alignof(T)));
  }

 private:
  static constexpr size_t kMost = 8192;  // of a large graph's objects most go back to malloc
  struct Free {
    Free* next;
  };
  struct Guard {
    Guard() {
      while (busy_.test_and_set(std::memory_order_acquire)) {
      }
    }
    ~Guard() { busy_.clear(std::memory_order_release); }
  };
  static inline std::atomic_flag busy_;
  static inline Free* free_ = nullptr;
  static inline size_t count_ = 0;
};

}  // namespace torch_xla
