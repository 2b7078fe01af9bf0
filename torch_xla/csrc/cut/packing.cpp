#include "cut/packing.h"

#include <algorithm>
#include <map>
#include <unordered_map>
#include <unordered_set>

#include "base/metric.h"
#include "base/python_hooks.h"
#include "tensor/lazy_clone.h"
#include "tensor/source.h"

namespace torch_xla {

namespace {

// A copy of more bytes than this costs more than a buffer of its own does (2-5 us on CPU).
constexpr int64_t kBytes = 16384;
constexpr size_t kMembers = 256;
// So many that are updated by the same operator make a pack of their own: horizontal.py then computes them as one.
constexpr size_t kAlike = 4;
// The others are computed where the pack is put together, and XLA's compile time grows with their number: on CPU, 160
// in one took ten times as long as in eights, twelves half as long again, and eights no longer than none.
constexpr size_t kMixed = 8;

bool small(const Meta& meta) {
  const auto n = meta.numel();
  return n > 0 && n * static_cast<int64_t>(c10::elementSize(meta.dtype)) <= kBytes;
}

const Meta& meta_of(const Graph& graph, uint32_t output) {
  return graph.outputs[output].node->meta(graph.outputs[output].index);
}

PyObject* buffer_of_leaf(const NodePtr& leaf, uint32_t slot) {
  fetch_buffer(leaf);
  TORCH_CHECK(leaf->buffer != nullptr, "[run] input ", slot, " has no buffer");
  return leaf->buffer;
}

// What someone else has too, as a read that is not over does, is not written over: the program gets a copy. Deciding
// that at the cut instead would give each set of such buffers a program of its own. Buffers are handed out under the
// barriers' lock, so none is between here and the results.
void copy_shared(std::vector<py::object>& buffers, const std::vector<size_t>& donors) {
  constexpr Py_ssize_t kOurs = 2;  // the leaf or the pack, and `buffers`
  std::vector<PyObject*> shared;
  std::vector<size_t> places;
  for (const auto place : donors) {
    if (Py_REFCNT(buffers[place].ptr()) > kOurs) {
      shared.push_back(buffers[place].ptr());
      places.push_back(place);
    }
  }
  if (shared.empty()) {
    return;
  }
  static auto& copied = metric("HeldBufferCopies");
  copied.add(static_cast<double>(shared.size()), "count");
  const auto copies = copy(shared);
  for (size_t i = 0; i < places.size(); ++i) {
    buffers[places[i]] = py::reinterpret_steal<py::object>(copies[i]);
  }
}

}  // namespace

Packing::Packing(const Graph& graph)
    : leaves(graph.leaves.size()), results(graph.outputs.size()), donated(graph.donated) {
  form(graph);
  for (auto* const slots : {&leaves, &results}) {
    uint32_t single = 0;
    for (auto& slot : *slots) {
      slot.index = slot.pack < 0 ? single++ : slot.index;
    }
  }
}

void Packing::form(const Graph& graph) {
  for (auto stack : graph.stacks) {
    close_pack(graph, stack, 1, /*stacked=*/true);
  }
  std::vector<int64_t> predecessors(graph.outputs.size(), -1);
  for (size_t i = 0; i < graph.leaves.size(); ++i) {
    if (graph.donated[i] && graph.aliased_outputs[i] >= 0) {
      predecessors[graph.aliased_outputs[i]] = static_cast<int64_t>(i);
    }
  }
  const auto groups = group_by_update(graph, predecessors);
  pack_updated(graph, groups);
  pack_gradients(graph, predecessors, groups);
}

std::vector<Members> Packing::group_by_update(const Graph& graph, const std::vector<int64_t>& predecessors) const {
  const auto roles = graph.roles();
  std::vector<Members> groups;
  std::unordered_map<Hash, size_t, HashHasher> group_of_role;  // group by role and dtype
  for (uint32_t i = 0; i < predecessors.size(); ++i) {
    if (predecessors[i] < 0 || results[i].pack >= 0) {
      continue;
    }
    const auto& [node, index] = graph.outputs[i];
    const auto& leaf = *graph.leaves[predecessors[i]];
    const auto& before = leaf.outs->metas[0];
    const auto& after = node->meta(index);
    if (before.value == after.value && small(before) && is_replicated(leaf.placement) &&
        (graph.output_placements.empty() || is_replicated(graph.output_placements[i]))) {
      auto role = roles.at(graph.results[i].from);
      role.mix(static_cast<uint64_t>(after.dtype) << 32 | index);
      const auto [group, unused] = group_of_role.emplace(role, groups.size());
      groups.resize(std::max(groups.size(), group->second + 1));
      groups[group->second].leaves.push_back(static_cast<uint32_t>(predecessors[i]));
      groups[group->second].outputs.push_back(i);
    }
  }
  return groups;
}

void Packing::pack_updated(const Graph& graph, const std::vector<Members>& groups) {
  std::map<at::ScalarType, Members> mixed;
  for (const auto& group : groups) {
    Members pack;
    for (size_t k = 0; k < group.outputs.size(); ++k) {
      pack.leaves.push_back(group.leaves[k]);
      pack.outputs.push_back(group.outputs[k]);
      close_pack(graph, pack, kMembers);
    }
    close_pack(graph, pack, kAlike);
    for (size_t k = 0; k < pack.outputs.size(); ++k) {
      auto& rest = mixed[meta_of(graph, pack.outputs[k]).dtype];
      rest.leaves.push_back(pack.leaves[k]);
      rest.outputs.push_back(pack.outputs[k]);
      close_pack(graph, rest, kMixed);
    }
  }
  for (auto& [dtype, pack] : mixed) {
    close_pack(graph, pack, 2);
  }
}

// What is new and has the shape of something updated is its gradient, mostly, and dies unread. Other results are
// inputs of the next step perhaps, and would have to be taken out of the pack again.
void Packing::pack_gradients(const Graph& graph, const std::vector<int64_t>& predecessors,
                             const std::vector<Members>& groups) {
  std::unordered_set<Hash, HashHasher> shapes;  // of what is updated
  for (const auto& group : groups) {
    for (const auto output : group.outputs) {
      shapes.insert(meta_of(graph, output).value);
    }
  }
  std::map<at::ScalarType, Members> gradients;
  for (uint32_t i = 0; i < predecessors.size(); ++i) {
    const auto& meta = meta_of(graph, i);
    const bool replicated = graph.output_placements.empty() || is_replicated(graph.output_placements[i]);
    if (predecessors[i] < 0 && results[i].pack < 0 && replicated && meta.numel() > 1 && shapes.count(meta.value) > 0) {
      auto& pack = gradients[meta.dtype];
      pack.outputs.push_back(i);
      close_pack(graph, pack, kMembers);
    }
  }
  for (auto& [dtype, pack] : gradients) {
    close_pack(graph, pack, 2);
  }
}

void Packing::close_pack(const Graph& graph, Members& pack, size_t least, bool stacked) {
  const auto count = std::max(pack.outputs.size(), pack.leaves.size());
  if (count < least) {
    return;
  }
  const auto number = static_cast<int32_t>(packs.size());
  auto layout = std::make_shared<Pack::Layout>();
  int64_t start = 0;
  layout->stacked = stacked;
  for (uint32_t k = 0; k < count; ++k) {
    const auto& value = pack.outputs.empty() ? Value{graph.leaves[pack.leaves[k]], 0} : graph.outputs[pack.outputs[k]];
    const auto& meta = value.node->meta(value.index);
    layout->shapes.emplace_back(meta.sizes.begin(), meta.sizes.end());
    layout->starts.push_back(start);
    start += meta.numel();
    if (!pack.outputs.empty()) {
      results[pack.outputs[k]] = {number, k};
    }
    if (!pack.leaves.empty()) {
      leaves[pack.leaves[k]] = {number, k};
    }
  }
  layouts.push_back(std::move(layout));
  packs.push_back(std::exchange(pack, {}));
}

py::object Packing::assemble(size_t number, const Arguments& arguments) const {
  const auto& [members, outputs] = packs[number];
  std::vector<PyObject*> parts;
  for (const auto slot : members) {
    parts.push_back(buffer_of_leaf(arguments.leaves[slot], slot));
  }
  auto packed = py::reinterpret_steal<py::object>(pack(parts, layouts[number]->stacked));
  if (outputs.empty()) {  // the run leaves them as they are: they rest together from now on
    auto resident = c10::make_intrusive<Pack>(packed.inc_ref().ptr(), layouts[number]);
    std::vector<c10::intrusive_ptr<Source>> before;  // destroyed after the lock is gone
    const RecorderLock lock;
    for (uint32_t k = 0; k < members.size(); ++k) {
      auto& leaf = *arguments.leaves[members[k]];
      before.push_back(std::exchange(leaf.source, resident));
      leaf.source_index = k;
      release_object(std::exchange(leaf.buffer, nullptr));
    }
  }
  return packed;
}

std::vector<py::object> Packing::gather(const Arguments& arguments) const {
  fetch_clones(clones_to_fetch(arguments.leaves, donated));
  std::vector<py::object> buffers;
  std::vector<size_t> donors;  // among them
  buffers.reserve(leaves.size());
  for (uint32_t i = 0; i < leaves.size(); ++i) {
    if (leaves[i].pack < 0) {
      if (donated[i]) {
        donors.push_back(buffers.size());
      }
      buffers.push_back(py::reinterpret_borrow<py::object>(buffer_of_leaf(arguments.leaves[i], i)));
    }
  }
  for (size_t k = 0; k < packs.size(); ++k) {
    const auto& members = packs[k].leaves;
    if (members.empty()) {
      continue;
    }
    if (!packs[k].outputs.empty()) {  // its members are all donated
      donors.push_back(buffers.size());
    }
    const auto* const pack = pack_of(*arguments.leaves[members[0]]);
    if (pack != nullptr && pack->holds(arguments.leaves, members)) {
      buffers.push_back(py::reinterpret_borrow<py::object>(pack->buffer));
    } else {
      buffers.push_back(assemble(k, arguments));
    }
  }
  copy_shared(buffers, donors);
  return buffers;
}

Vector<Arguments::Result> Packing::results_of(const py::tuple& buffers) const {
  const auto array = [&](size_t i) { return Py_NewRef(PyTuple_GET_ITEM(buffers.ptr(), static_cast<Py_ssize_t>(i))); };
  std::vector<c10::intrusive_ptr<Pack>> result_packs;
  size_t next_pack = 0;
  for (size_t k = 0; k < packs.size(); ++k) {
    result_packs.push_back(packs[k].outputs.empty() ? nullptr
                                                    : c10::make_intrusive<Pack>(array(next_pack++), layouts[k]));
  }
  Vector<Arguments::Result> per_output;
  per_output.reserve(results.size());
  for (const auto& place : results) {
    if (place.pack >= 0) {
      per_output.push_back({nullptr, result_packs[place.pack], place.index});
    } else {
      per_output.push_back({array(next_pack + place.index)});
    }
  }
  return per_output;
}

}  // namespace torch_xla
