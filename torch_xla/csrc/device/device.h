// Device type `xla` in PyTorch: which device is current, how many there are, generators.
#pragma once
#include <c10/core/Device.h>

#include <optional>

namespace torch_xla {

// PyTorch starts one autograd thread per device at the first backward of the process, even a CPU one, and asks for the
// number then; it is set at import and never starts a client.
void set_device_count(c10::DeviceIndex count);
c10::DeviceIndex device_count();
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex index);
// The index by which programs name the only device of a process of a job, as if it saw those of its host: its
// LOCAL_RANK; 0 where that is no other name.
void set_own_index(int index);
// The index of the device that an index names; the same one where there is none.
int known_index(int index);
// The device that an argument means: one without an index is the current one. Raises where there is none.
c10::DeviceIndex device_index(const std::optional<c10::Device>& device);

// Whether the one device stands for several, over which buffers may be split (SPMD).
bool spans_mesh();
void set_spans_mesh(bool on);

}  // namespace torch_xla
