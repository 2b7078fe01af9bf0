#include "cut/adaptive.h"

#include <unordered_map>

#include "tensor/storage.h"

namespace torch_xla {

namespace {

// Graphs that are remembered; beyond them one costs a compile more when it comes again.
constexpr size_t kGraphs = 1 << 14;

struct Known {
  Vector<uint64_t> first;
  Vector<bool> vary;
};

std::unordered_map<Hash, Known, HashHasher>& known() {
  static auto* const graphs = new std::unordered_map<Hash, Known, HashHasher>();
  return *graphs;
}

}  // namespace

void find_varying(const Hash& structure, const Vector<uint64_t>& numbers, Vector<bool>& vary, bool runs) {
  auto& graphs = known();
  auto found = graphs.find(structure);
  if (found == graphs.end()) {
    if (!runs) {
      return;
    }
    if (graphs.size() >= kGraphs) {
      graphs.clear();
    }
    found = graphs.emplace(structure, Known{numbers, vary}).first;
  }
  auto& known = found->second;
  for (size_t i = 0; i < numbers.size(); ++i) {
    vary[i] = vary[i] || known.vary[i] || (runs && numbers[i] != known.first[i]);
  }
  if (runs) {
    known.vary = vary;
  }
}

void forget_varying() {
  const RecorderLock lock;
  known().clear();
}

}  // namespace torch_xla
