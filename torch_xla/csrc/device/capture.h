// Which devices are captured: what one thread records there becomes a program that runs at each replay; see
// run/captured.h. The thread's backward passes, which PyTorch runs in threads of its own, are a part of it.
#pragma once
#include <c10/core/Device.h>

#include <atomic>
#include <cstdint>

namespace torch_xla {

extern std::atomic<int> captured_devices;  // how many

bool is_captured_slow(c10::DeviceIndex device);
inline bool is_captured(c10::DeviceIndex device) {
  return C10_UNLIKELY(captured_devices.load(std::memory_order_relaxed) != 0) && is_captured_slow(device);
}
// Whether the calling thread captures a device.
bool captures_here();
// Whether what is remembered of a device's values holds: a number that was read, how many elements are set. While a
// graph is captured nothing is known of values, since each replay has others: whoever remembers them asks here first.
inline bool knows_values(c10::DeviceIndex device) {
  return C10_LIKELY(captured_devices.load(std::memory_order_relaxed) == 0) ||
         !(is_captured_slow(device) || captures_here());
}
// Raises where another thread captures the device.
void check_captured_here(c10::DeviceIndex device);

// Begins and ends; storages with ids from `first_storage` on are made within. Want the GIL.
void begin_captured(c10::DeviceIndex device, uint64_t first_storage);
void end_captured(c10::DeviceIndex device, uint64_t node_sequence);
uint64_t first_captured_storage(c10::DeviceIndex device);
// The node sequence at which the latest capture ended: what was recorded before belongs to a graph, or is computed.
uint64_t end_of_capture(c10::DeviceIndex device);

}  // namespace torch_xla
