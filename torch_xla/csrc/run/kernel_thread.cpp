#include "run/kernel_thread.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/thread_pool.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <mutex>

// Those of the OpenMP that PyTorch's kernels call, as both look them up in the same libraries; missing where it was
// built with another kind of threads, the second one before OpenMP 5.0.
extern "C" [[gnu::weak]] void omp_set_num_threads(int);
extern "C" [[gnu::weak]] int omp_pause_resource_all(int);
// Of MKL in PyTorch, which does not ask OpenMP for the number once `torch.set_num_threads` has told it one.
extern "C" [[gnu::weak]] int MKL_Set_Num_Threads_Local(int);

namespace torch_xla {

namespace {

std::atomic<uint64_t> uses{0};  // of the kernel thread

void pause_team() {
  constexpr int kSoft = 1;  // omp_pause_soft
  if (omp_pause_resource_all) {
    omp_pause_resource_all(kSoft);
  }
}

// The child of a fork has no team, but its thread would wait for the one that it had.
const int released_before_forks = pthread_atfork(&pause_team, nullptr, nullptr);

}  // namespace

std::shared_future<void> start_in_kernel_thread(std::function<void()> work) {
  struct Thread {
    pid_t process = 0;
    c10::ThreadPool* pool = nullptr;  // never destroyed: it may be at work when the process ends
  };
  static auto* const mutex = new std::mutex;
  static auto* const thread = new Thread;
  ++uses;
  release_team();
  const auto task = std::make_shared<std::packaged_task<void()>>(std::move(work));
  const std::lock_guard<std::mutex> lock(*mutex);
  if (thread->process != getpid()) {
    // One of XLA's threads may start it, which take the smallest numbers for zero, and so would what they start.
    *thread = {getpid(), new c10::ThreadPool(1, -1, [] { at::globalContext().setFlushDenormal(false); })};
  }
  thread->pool->run([task] { (*task)(); });
  return task->get_future().share();
}

void release_team() {
  thread_local uint64_t seen = 0;
  if (const auto now = uses.load(std::memory_order_relaxed); now != seen) {
    seen = now;
    pause_team();
  }
}

SingleThreaded::SingleThreaded()
    : threads_(at::get_num_threads()) {  // the first time in a thread, this sets the number
  if (omp_set_num_threads) {
    omp_set_num_threads(1);
  }
  if (MKL_Set_Num_Threads_Local) {
    MKL_Set_Num_Threads_Local(1);
  }
}

SingleThreaded::~SingleThreaded() {
  if (omp_set_num_threads) {
    omp_set_num_threads(threads_);
  }
  if (MKL_Set_Num_Threads_Local) {
    MKL_Set_Num_Threads_Local(0);  // as for all threads
  }
}

}  // namespace torch_xla
