// What a backward pass computes a second time, to hold less in memory meanwhile (activation checkpointing), must not be
// merged with the first time by XLA.
#pragma once
#include "ir.h"

namespace torch_xla {

// `value` for a call recorded now: behind an optimization barrier where the call is part of a recomputation and the
// value comes from outside of it. Wants the recorder's lock.
Value separated(const Value& value, c10::DeviceIndex device);

// What random numbers drawn now wait for: in a recomputation the gradient it is for, else nothing. They have no input
// that a barrier could hold back. Wants the lock.
Value awaited(c10::DeviceIndex device);

// Tells of each recorded call, so that a recomputation waits for the gradient that wants it. Wants the lock.
void note_recorded(const NodePtr& node, c10::DeviceIndex device);

}  // namespace torch_xla
