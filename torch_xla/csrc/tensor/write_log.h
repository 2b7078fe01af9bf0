// Which value each storage was given when, since the device's latest barrier: a cut that lies further back asks what a
// storage had there. All functions want the recorder's lock.
#pragma once
#include "tensor/storage.h"

namespace torch_xla {

struct Write {
  uint64_t storage;  // its id
  uint64_t when;     // the node sequence after it
  ValueId value;
};

// Takes notice of a write that was just done.
void note_write(const Storage& storage);
// Those of a device, in order.
const Vector<Write>& writes(c10::DeviceIndex device);
// Forgets those that were done before a node sequence.
void forget_writes(c10::DeviceIndex device, uint64_t until);

}  // namespace torch_xla
