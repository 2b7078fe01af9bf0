// Numbers that shape what XLA can do with a program, such as where a part of a tensor begins: constants of it, until a
// graph comes that differs from an earlier one in nothing else.
#pragma once
#include <cstdint>
#include <vector>

#include "base/hash.h"
#include "base/pool.h"

namespace torch_xla {

// Sets for each adaptive number of a graph, given by its place and its bits, whether it was seen to vary, as some were.
// `structure` is the key of all graphs that differ in their numbers only, places ascend, and `runs` says that this one
// is about to run, not only looked at. Wants the recorder's lock.
void find_varying(const Hash& structure, const Vector<uint64_t>& places, const Vector<uint64_t>& numbers,
                  Vector<bool>& vary, bool runs);

// Forgets what varied, and what was compiled.
void forget_varying();
void forget_constants();

}  // namespace torch_xla
