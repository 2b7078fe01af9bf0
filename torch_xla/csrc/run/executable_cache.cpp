#include "run/executable_cache.h"

#include <algorithm>

#include "cut/adaptive.h"
#include "cut/division.h"

namespace torch_xla {

namespace {

// The key of the same graph once what may be anywhere is where the program has it: that of a loop's second step.
Hash resolved_key(const Graph& graph, const Program& program) {
  if (graph.wanted.empty()) {
    return graph.key;
  }
  Vector<uint32_t> at;
  auto to = graph.wanted;
  for (size_t i = 0; i < graph.leaves.size(); ++i) {
    at.push_back(program.inputs[i].placement);
    const auto successor = graph.successors.empty() ? -1 : graph.successors[i];
    if (graph.leaves[i]->placement == kAnywhere && successor >= 0 && to[successor] == kAnywhere) {
      to[successor] = program.outputs[successor].placement;
    }
  }
  return graph.placed_key(at, to);
}

}  // namespace

const ExecutableCache::Entry* ExecutableCache::look_up(Graph& graph, uint64_t settings) {
  const auto found = index_.find({graph.key, settings});
  if (found == index_.end() || !graph.share_as(found->second->program->sharing)) {
    return nullptr;
  }
  entries_.splice(entries_.end(), entries_, found->second);
  ++hits;
  return &entries_.back();
}

bool ExecutableCache::knows(const Graph& graph, uint64_t settings) const {
  const auto found = index_.find({graph.key, settings});
  return found != index_.end() && found->second->program->sharing->holds(graph.numbers);
}

py::object ExecutableCache::find(Graph& graph, uint64_t settings) {
  const auto* entry = look_up(graph, settings);
  if (entry == nullptr && !(graph.same_as == Hash())) {
    const auto same = index_.find({graph.same_as, settings});
    if (same != index_.end()) {
      add(graph, settings, same->second->executable, same->second->program);
      entry = look_up(graph, settings);
    }
  }
  return entry != nullptr ? entry->executable : py::none();
}

bool ExecutableCache::run(Graph& graph, uint64_t settings) {
  const auto* entry = look_up(graph, settings);
  if (entry == nullptr) {
    return false;
  }
  const auto program = entry->program;  // the entry may be dropped while the device is waited for
  execute(graph, *program);
  return true;
}

void ExecutableCache::add(const Graph& graph, uint64_t settings, py::object executable,
                          std::shared_ptr<Program> program) {
  const auto placed = resolved_key(graph, *program);
  if (!(placed == graph.key)) {
    insert({{placed, settings}, executable, program});
  }
  insert({{graph.key, settings}, std::move(executable), std::move(program)});
}

void ExecutableCache::insert(Entry entry) {
  const auto found = index_.find(entry.key);
  if (found != index_.end()) {
    std::swap(*found->second, entry);  // the older one goes when the cache is in order again: that may run Python code
    entries_.splice(entries_.end(), entries_, found->second);
    return;
  }
  entries_.push_back(std::move(entry));
  index_.emplace(entries_.back().key, std::prev(entries_.end()));
}

void ExecutableCache::drop(size_t count) {
  std::list<Entry> dropped;  // destroyed last, as above
  for (; count > 0 && !entries_.empty(); --count) {
    index_.erase(entries_.front().key);
    dropped.splice(dropped.end(), entries_, entries_.begin());
  }
}

void ExecutableCache::clear() {
  drop(size());
  forget_varying();
  forget_constants();
  forget_divisions();
}

py::list ExecutableCache::values() const {
  py::list found;
  for (const auto& entry : entries_) {
    found.append(entry.executable);
  }
  return found;
}

}  // namespace torch_xla
