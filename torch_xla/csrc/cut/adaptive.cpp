#include "cut/adaptive.h"

#include <unordered_map>

#include "tensor/storage.h"

namespace torch_xla {

namespace {

// Graphs that are remembered; beyond them one costs a compile more when it comes again.
constexpr size_t kGraphs = 1 << 14;

struct History {
  Vector<uint64_t> positions;
  Vector<uint64_t> first;
  Vector<bool> vary;
};

std::unordered_map<Hash, History, HashHasher>& histories() {
  static auto* const graphs = new std::unordered_map<Hash, History, HashHasher>();
  return *graphs;
}

// The history carried over to other positions, after policies changed to or from constants.
History moved_history(const History& before, const Vector<uint64_t>& positions, const Vector<uint64_t>& numbers,
                      const Vector<bool>& vary) {
  History history{positions, numbers, vary};
  for (size_t i = 0, k = 0; i < positions.size(); ++i) {
    while (k < before.positions.size() && before.positions[k] < positions[i]) {
      ++k;
    }
    if (k < before.positions.size() && before.positions[k] == positions[i]) {
      history.first[i] = before.first[k];
      history.vary[i] = before.vary[k];
    }
  }
  return history;
}

}  // namespace

void find_varying(const Hash& structure, const Vector<uint64_t>& positions, const Vector<uint64_t>& numbers,
                  Vector<bool>& vary, bool runs) {
  auto& graphs = histories();
  auto history = graphs.find(structure);
  if (history == graphs.end()) {
    if (!runs) {
      return;
    }
    if (graphs.size() >= kGraphs) {
      graphs.clear();
    }
    history = graphs.emplace(structure, History{positions, numbers, vary}).first;
  }
  History moved;
  const bool same = history->second.positions == positions;
  if (!same) {
    moved = moved_history(history->second, positions, numbers, vary);
  }
  auto& current = same ? history->second : moved;
  for (size_t i = 0; i < numbers.size(); ++i) {
    vary[i] = vary[i] || current.vary[i] || (runs && numbers[i] != current.first[i]);
  }
  if (runs) {
    current.vary = vary;
    if (!same) {
      history->second = std::move(moved);
    }
  }
}

void forget_varying() {
  const RecorderLock lock;
  histories().clear();
}

}  // namespace torch_xla
