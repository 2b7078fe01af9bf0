// Collectives on a CPU, within a program, where XLA calls them from its own threads, or as an operator that runs for
// itself: PyTorch's process groups move the values.
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "run/host_operators.h"

namespace torch_xla {

// The function that XLA calls, as a capsule; None if this was built without jaxlib's headers.
py::object collective_kernel_target();

// One, as `ops/collective_call.py` describes it.
struct Collective {
  std::string kind;
  std::vector<int64_t> groups;  // the ranks of all
  std::vector<int64_t> sizes;   // of each group
  std::vector<int64_t> ahead;   // numbers of this and of what its group runs next; none where it was compared before
  int64_t reduction = 0;
  int64_t root = 0;
  std::vector<int64_t> sources, targets;  // of a `permute`
};
// Waits for the others of this process's group. Throws c10::Error.
void run_collective(const Collective& collective, const std::vector<at::Tensor>& in,
                    const std::vector<at::Tensor>& out);

// One by the dtypes of its values: their places, and what is done with them.
using CollectiveParts = std::vector<std::pair<std::vector<size_t>, Collective>>;
// Runs one; gives a result per input, and a number.
HostResults run_collectives(const CollectiveParts& parts, const std::vector<at::Tensor>& inputs,
                            const std::vector<Meta>& results);

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
