#include "device/capture.h"

#include <ATen/ThreadLocalPythonObjects.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/utils/pybind.h>

#include <array>
#include <limits>
#include <memory>
#include <string>

namespace torch_xla {

namespace {

using at::impl::ThreadLocalPythonObjects;

struct Captured {
  std::shared_ptr<c10::SafePyObject> token;  // kept, so that no later one has its address
  std::atomic<const void*> thread{nullptr};  // the token of the one that captures it
  std::atomic<uint64_t> first_storage{0};
  std::atomic<uint64_t> end{0};
};

Captured& device_at(c10::DeviceIndex device) {
  static auto* const all = new std::array<Captured, std::numeric_limits<c10::DeviceIndex>::max()>;
  return all->at(device);
}

// PyTorch carries it over to the threads of a backward pass.
const std::string& key() {
  static const auto* const name = new std::string("torch_xla.capture");
  return *name;
}

const void* own_token() {
  return ThreadLocalPythonObjects::contains(key()) ? ThreadLocalPythonObjects::get(key()).get() : nullptr;
}

}  // namespace

std::atomic<int> captured_devices{0};

bool is_captured_slow(c10::DeviceIndex device) { return device_at(device).thread.load() != nullptr; }

bool captures_here() {
  if (captured_devices.load() == 0) {
    return false;
  }
  const auto* const token = own_token();
  for (c10::DeviceIndex device = 0; token != nullptr && device < std::numeric_limits<c10::DeviceIndex>::max();
       ++device) {
    if (device_at(device).thread.load() == token) {
      return true;
    }
  }
  return false;
}

void check_captured_here(c10::DeviceIndex device) {
  if (is_captured(device)) {
    TORCH_CHECK(device_at(device).thread.load() == own_token(),
                "[graph] got an operator of another thread on xla:", static_cast<int>(device),
                " while a graph is captured there, expected those of the thread that ",
                "captures; use the device in one thread at a time");
  }
}

void begin_captured(c10::DeviceIndex device, uint64_t first_storage) {
  auto& captured = device_at(device);
  captured.token = std::make_shared<c10::SafePyObject>(py::none().release().ptr(), getPyInterpreter());
  ThreadLocalPythonObjects::set(key(), captured.token);
  captured.first_storage = first_storage;
  captured.thread = captured.token.get();
  ++captured_devices;
}

void end_captured(c10::DeviceIndex device, uint64_t node_sequence) {
  device_at(device).end = node_sequence;
  if (device_at(device).thread.exchange(nullptr) != nullptr) {
    --captured_devices;
  }
}

uint64_t first_captured_storage(c10::DeviceIndex device) { return device_at(device).first_storage; }

uint64_t end_of_capture(c10::DeviceIndex device) { return device_at(device).end; }

}  // namespace torch_xla
