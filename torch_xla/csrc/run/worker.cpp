#include "run/worker.h"

#include <array>
#include <deque>
#include <thread>
#include <utility>

#include "tensor/storage.h"

namespace torch_xla {

namespace {

class Worker {
 public:
  Worker() {
    std::thread([this] { work(); }).detach();
  }

  void add(std::shared_ptr<Task> task) {
    const std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    added_.notify_one();
  }

  const pid_t process = getpid();

 private:
  void work() {
    for (;;) {
      std::shared_ptr<Task> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        added_.wait(lock, [&] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      task->run();
    }
  }

  std::mutex mutex_;
  std::condition_variable added_;
  std::deque<std::shared_ptr<Task>> tasks_;
};

// Lives as long as the process; a forked one makes its own.
Worker& worker_of(c10::DeviceIndex device) {
  static auto* const mutex = new std::mutex;
  static auto* const workers = new std::array<Worker*, kMaxDevices>{};
  const std::lock_guard<std::mutex> lock(*mutex);
  auto*& worker = (*workers)[device];
  if (worker == nullptr || worker->process != getpid()) {
    worker = new Worker;
  }
  return *worker;
}

}  // namespace

std::shared_ptr<Task> Task::start(c10::DeviceIndex device, std::function<void()> work) {
  auto task = std::make_shared<Task>();
  task->work_ = std::move(work);
  worker_of(device).add(task);
  return task;
}

bool Task::wait_for(std::chrono::milliseconds time) {
  std::unique_lock<std::mutex> lock(mutex_);
  return changed_.wait_for(lock, time, [&] { return done_; });
}

void Task::run() {
  work_();
  const std::lock_guard<std::mutex> lock(mutex_);
  work_ = {};
  done_ = true;
  changed_.notify_all();
}

}  // namespace torch_xla
