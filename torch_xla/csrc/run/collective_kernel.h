// Collectives within a program that runs on a CPU: XLA calls them from its own threads, and PyTorch's process groups
// move the values.
#pragma once
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torch_xla {

// The function that XLA calls, as a capsule; None if this was built without jaxlib's headers.
py::object collective_kernel_target();

// Tells the kernel which process of the job this is.
void set_collective_rank(int64_t rank);
// Gives it the process group of some processes, in their order; kept for the life of the process, since a group that is
// destroyed waits for what was started on it.
void add_collective_group(const std::vector<int64_t>& ranks, const py::object& backend);

// What this process waits for in a collective.
struct CollectiveWait {
  std::vector<int64_t> ranks;  // of the group; none where it waits for nothing
  std::string what;
  uint64_t count = 0;  // of the group's collectives so far
  double seconds = 0;
};
CollectiveWait collective_wait();
// A collective that failed: in words, and where members were about to run different ones, this process's number of it,
// the other rank and its number.
struct CollectiveFailure {
  std::string what;
  std::vector<int64_t> differing;
};
// The latest since the last call.
std::optional<CollectiveFailure> take_collective_failure();
// Has all collectives fail, those that are under way too.
void stop_collectives(const std::string& reason);

}  // namespace torch_xla
