// Threads that compute beside the host, without Python: one for each device, which does one thing after another.
#pragma once
#include <c10/core/Device.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>

namespace torch_xla {

// What such a thread is to do, once.
class Task {
 public:
  // In the thread of a device. What it does must not raise.
  static std::shared_ptr<Task> start(c10::DeviceIndex device, std::function<void()> work);
  // Whether it is done; waits for so long.
  bool wait_for(std::chrono::milliseconds time);
  // Whether this process was forked since, and has no such thread.
  bool lost() const { return process_ != getpid(); }
  void run();

 private:
  const pid_t process_ = getpid();
  std::function<void()> work_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
};

}  // namespace torch_xla
