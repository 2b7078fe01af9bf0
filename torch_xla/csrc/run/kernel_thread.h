// The one thread whose PyTorch kernels are divided among OpenMP's threads: graphs that run op by op and large kernels
// in programs, one after another, beside the host and without Python.
//
// OpenMP keeps a team of threads for each thread that ever divided a kernel. GNU's lets a thread that waits for work
// spin 300,000 times, but only 1,000 times while it manages more threads than there are processors
// (`gomp_throttled_spin_count_var`, which no setting raises). With a second team, such as the one that the main thread
// got when it made the model, each kernel ends in a sleep and a wake-up: ResNet-18 takes 1.4 times as long. So our
// other threads compute alone, and the team of a thread that starts a run is released.
#pragma once
#include <functional>
#include <future>

namespace torch_xla {

// Begins something in this thread, which lives as long as the process; a forked process makes its own. The calling
// thread's team is released.
std::shared_future<void> start_in_kernel_thread(std::function<void()> work);

// Releases the team that the calling thread has, if the kernel thread was used since that thread asked last. OpenMP
// makes it again where it is needed; where there is none, or no OpenMP, nothing happens.
void release_team();

// A scope in which PyTorch's kernels stay in the calling thread.
class SingleThreaded {
 public:
  SingleThreaded();
  ~SingleThreaded();
  SingleThreaded(const SingleThreaded&) = delete;
  SingleThreaded& operator=(const SingleThreaded&) = delete;

 private:
  const int threads_;
};

}  // namespace torch_xla
