// Threads that compute beside the host, without Python: one for each device and one for the kernels that programs call,
// each of which does one thing after another.
#pragma once
#include <cstddef>
#include <functional>
#include <future>

#include "tensor/storage.h"

namespace torch_xla {

// After those of the devices.
constexpr size_t kProgramsWorker = kMaxDevices;

// Begins something in such a thread, which lives as long as the process; a forked process makes its own.
std::shared_future<void> start_in(size_t worker, std::function<void()> work);

}  // namespace torch_xla
