// Programs that the processes of a job run together, by collectives of XLA's: how far each group has come. Nothing can
// be asked of such a program while it runs.
#pragma once
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <string>
#include <vector>

namespace torch_xla {

// One start of a program, under the GIL.
struct Meeting {
  int64_t group = -1;   // whom it takes, by a number that Python gives out
  int64_t meaning = 0;  // what it does
  uint64_t count = 0;   // number among those of its group
  double seconds = 0;   // since it was started
  bool failed = false;
};

// Notes a start; gives what `met` takes.
uint64_t meet(int64_t group, int64_t meaning);
// Tells the token of a start, or that it failed without one.
void met(uint64_t start, py::object token);
// What was started and has not come to its end, oldest first; then failures that nobody was told of, once.
std::vector<Meeting> meetings();

// The latest starts of a group, oldest first, of which the last has this number. Each link of the chain stands for all
// starts until then, so that two processes need compare one.
struct Started {
  uint64_t count = 0;
  std::vector<int64_t> chain;
  std::vector<int64_t> meanings;
};
Started started(int64_t group);

}  // namespace torch_xla
