// A clone of a leaf is a leaf of its own that has the original's values. So a graph has the same inputs, and the same
// key, whether the two tensors still agree or not. It gets a buffer when a program takes it, or when one is about to
// write over the original's; a clone whose tensor is gone by then is the original again, and never copied.
#pragma once
#include "tensor/source.h"
#include "tensor/storage.h"

namespace torch_xla {

// The leaf whose values a clone has that has no buffer of its own; null for others.
const NodePtr* original_of(const Node& leaf);
// Whether a value can be cloned: a leaf that has its values.
bool is_cloneable(const Node& node);
// The clone of such a leaf. `holder` is the storage it is for; null where it outlives the storage's first barrier.
Value clone_leaf(const Value& leaf, const StoragePtr& holder);
// Puts the original in the place of a clone whose holder is gone. Wants the recorder's lock.
void merge_clone(Value& value);
// How many clones of a leaf have no buffer yet. Wants the recorder's lock.
uint32_t bufferless_clones(const Node& leaf);
// What must get a buffer before a program takes these leaves, and writes over those that are donated.
Vector<NodePtr> clones_to_fetch(const Vector<NodePtr>& leaves, const Vector<bool>& donated);
// Gives clones their buffers, all in one go. Wants the GIL, not the recorder's lock.
void fetch_clones(const Vector<NodePtr>& clones);

}  // namespace torch_xla
