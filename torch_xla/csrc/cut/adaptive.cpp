#include "cut/adaptive.h"

#include <unordered_map>

#include "tensor/storage.h"

namespace torch_xla {

namespace {

// Graphs that are remembered; beyond them one costs a compile more when it comes again.
constexpr size_t kGraphs = 1 << 14;

struct Known {
  Vector<uint64_t> places;
  Vector<uint64_t> first;
  Vector<bool> vary;
};

std::unordered_map<Hash, Known, HashHasher>& known() {
  static auto* const graphs = new std::unordered_map<Hash, Known, HashHasher>();
  return *graphs;
}

// Of other numbers of the same graph, which policies have changed to or from constants since.
Known of_places(const Known& known, const Vector<uint64_t>& places, const Vector<uint64_t>& numbers,
                const Vector<bool>& vary) {
  Known found{places, numbers, vary};
  for (size_t i = 0, k = 0; i < places.size(); ++i) {
    while (k < known.places.size() && known.places[k] < places[i]) {
      ++k;
    }
    if (k < known.places.size() && known.places[k] == places[i]) {
      found.first[i] = known.first[k];
      found.vary[i] = known.vary[k];
    }
  }
  return found;
}

}  // namespace

void find_varying(const Hash& structure, const Vector<uint64_t>& places, const Vector<uint64_t>& numbers,
                  Vector<bool>& vary, bool runs) {
  auto& graphs = known();
  auto found = graphs.find(structure);
  if (found == graphs.end()) {
    if (!runs) {
      return;
    }
    if (graphs.size() >= kGraphs) {
      graphs.clear();
    }
    found = graphs.emplace(structure, Known{places, numbers, vary}).first;
  }
  Known moved;
  const bool same = found->second.places == places;
  if (!same) {
    moved = of_places(found->second, places, numbers, vary);
  }
  auto& known = same ? found->second : moved;
  for (size_t i = 0; i < numbers.size(); ++i) {
    vary[i] = vary[i] || known.vary[i] || (runs && numbers[i] != known.first[i]);
  }
  if (runs) {
    known.vary = vary;
    if (!same) {
      found->second = std::move(moved);
    }
  }
}

void forget_varying() {
  const RecorderLock lock;
  known().clear();
}

}  // namespace torch_xla
