// What a backward pass computes a second time, to hold less in memory meanwhile (activation checkpointing), must not be
// merged with the first time by XLA.
#pragma once
#include "ir/node.h"

namespace torch_xla {

// What the calling thread records now.
enum class Phase : uint8_t {
  Forward,
  Backward,
  Recomputation,  // a forward pass with gradients on in the middle of a backward pass, as checkpointing runs it
};
Phase current_phase();

// `value` for a call of a recomputation: behind an optimization barrier where it comes from outside of it. Wants the
// recorder's lock.
Value behind_barrier(const Value& value, c10::DeviceIndex device);

// What random numbers of a recomputation wait for: the gradient it is for. They have no input that a barrier could hold
// back. Wants the lock.
Value gradient_to_wait_for(c10::DeviceIndex device);

// Tells of each call of a backward pass, so that a recomputation waits for the gradient that wants it. Wants the lock.
void note_backward(const NodePtr& node, c10::DeviceIndex device);

}  // namespace torch_xla
