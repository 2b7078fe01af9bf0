// Walks over pending values. Each marks what it meets with an epoch of its own; all want the recorder's lock.
#pragma once
#include "ir/node.h"

namespace torch_xla {

// The walk that the marks of nodes belong to.
uint64_t latest_epoch();
// Starts a new one.
uint64_t next_epoch();

// Marks everything `roots` need and returns the nodes of it that are to be computed. An explicit stack: a chain may be
// a million nodes long.
Vector<Node*> reach(Vector<Value>& roots);

// Puts nodes in recording order. Their numbers are mostly dense, and each then finds its place without a comparison.
void sort_by_sequence(Vector<Node*>& nodes);

}  // namespace torch_xla
