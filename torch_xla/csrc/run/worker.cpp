#include "run/worker.h"

#include <c10/core/thread_pool.h>
#include <unistd.h>

#include <array>
#include <memory>
#include <mutex>

namespace torch_xla {

std::shared_future<void> start_in(size_t worker, std::function<void()> work) {
  struct Thread {
    pid_t process = 0;
    c10::ThreadPool* pool = nullptr;  // never destroyed: it may be at work when the process ends
  };
  static auto* const mutex = new std::mutex;
  static auto* const threads = new std::array<Thread, kProgramsWorker + 1>;
  const auto task = std::make_shared<std::packaged_task<void()>>(std::move(work));
  const std::lock_guard<std::mutex> lock(*mutex);
  auto& thread = threads->at(worker);
  if (thread.process != getpid()) {
    thread = {getpid(), new c10::ThreadPool(1)};
  }
  thread.pool->run([task] { (*task)(); });
  return task->get_future().share();
}

}  // namespace torch_xla
