#include "run/executable_cache.h"

#include <algorithm>

#include "cut/graph.h"
#include "cut/host_partition.h"

namespace torch_xla {

namespace {

// The key of the same graph once what may be anywhere is where the program has it: that of a loop's second step.
Hash resolved_key(const Graph& graph, const Program& program) {
  if (graph.output_placements.empty()) {
    return graph.key;
  }
  Vector<uint32_t> at;
  auto to = graph.output_placements;
  for (size_t i = 0; i < graph.leaves.size(); ++i) {
    at.push_back(program.inputs[i].placement);
    const auto aliased = graph.aliased_outputs.empty() ? -1 : graph.aliased_outputs[i];
    if (graph.leaves[i]->placement == kUnspecified && aliased >= 0 && to[aliased] == kUnspecified) {
      to[aliased] = program.outputs[aliased].placement;
    }
  }
  return graph.key_with_placements(at, to);
}

}  // namespace

const ExecutableCache::Entry* ExecutableCache::look_up(Graph& graph, uint64_t settings) {
  const auto it = index_.find({graph.key, settings});
  if (it == index_.end() || !graph.adopt_scalar_layout(it->second->program->scalar_layout)) {
    return nullptr;
  }
  entries_.splice(entries_.end(), entries_, it->second);
  ++hits;
  return &entries_.back();
}

bool ExecutableCache::knows(const Graph& graph, uint64_t settings) const {
  const auto it = index_.find({graph.key, settings});
  return it != index_.end() && it->second->program->scalar_layout->holds(graph.numbers);
}

py::object ExecutableCache::find(Graph& graph, uint64_t settings) {
  const auto* entry = look_up(graph, settings);
  if (entry == nullptr && !(graph.equal_key == Hash())) {
    const auto same = index_.find({graph.equal_key, settings});
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
  const auto resolved = resolved_key(graph, *program);
  if (!(resolved == graph.key)) {
    insert({{resolved, settings}, executable, program});
  }
  insert({{graph.key, settings}, std::move(executable), std::move(program)});
}

void ExecutableCache::insert(Entry entry) {
  const auto it = index_.find(entry.key);
  if (it != index_.end()) {
    std::swap(*it->second, entry);  // the older one goes when the cache is in order again: that may run Python code
    entries_.splice(entries_.end(), entries_, it->second);
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
  forget_numbers();
  forget_host_partitions();
}

py::list ExecutableCache::values() const {
  py::list executables;
  for (const auto& entry : entries_) {
    executables.append(entry.executable);
  }
  return executables;
}

}  // namespace torch_xla
