// Numbers that XLA compiles better as constants, such as the start of a slice. They are constants until a graph comes
// that differs from an earlier one in nothing else, and inputs from then on: torch.compile's automatic dynamic shapes,
// for numbers.
#pragma once
#include <cstdint>
#include <vector>

#include "base/hash.h"
#include "base/pool.h"

namespace torch_xla {

// Sets `vary` for each adaptive number of a graph that had another value in an earlier graph with the same `structure`;
// entries that are set stay set. `structure` is the key without the numbers. `positions` are where the numbers are in
// the graph, in ascending order, and `numbers` are their bits. `runs` is false for a graph that is only looked at: it
// is not remembered. Wants the recorder's lock.
void find_varying(const Hash& structure, const Vector<uint64_t>& positions, const Vector<uint64_t>& numbers,
                  Vector<bool>& vary, bool runs);

// Forget the numbers that `find_varying`, and the constants that `Graph::constants_vary`, compares with.
void forget_varying();
void forget_constants();

}  // namespace torch_xla
