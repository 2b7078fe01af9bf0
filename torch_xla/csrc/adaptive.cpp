#include "adaptive.h"

#include <unordered_map>

#include "storage.h"

namespace torch_xla {

namespace {

// Graphs that are remembered; beyond them one costs a compile more when it comes again.
constexpr size_t kGraphs = 1 << 14;

struct Known {
  std::vector<uint64_t> first;
  std::vector<bool> vary;
};

std::unordered_map<Hash, Known, HashHasher>& known() {
  static auto* const graphs = new std::unordered_map<Hash, Known, HashHasher>();
  return *graphs;
}

}  // namespace

std::vector<bool> which_vary(const Hash& structure, const std::vector<uint64_t>& numbers, bool runs) {
  auto& graphs = known();
  const auto found = graphs.find(structure);
  if (found == graphs.end()) {
    std::vector<bool> none(numbers.size(), false);
    if (runs) {
      if (graphs.size() >= kGraphs) {
        graphs.clear();
      }
      graphs.emplace(structure, Known{numbers, none});
    }
    return none;
  }
  auto& [first, vary] = found->second;
  if (runs) {
    for (size_t i = 0; i < numbers.size(); ++i) {
      vary[i] = vary[i] || numbers[i] != first[i];
    }
  }
  return vary;
}

void forget_varying() {
  const RecorderLock lock;
  known().clear();
}

}  // namespace torch_xla
