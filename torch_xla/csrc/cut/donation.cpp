// Which buffers a program may write over: those of overwritten tensors, and those that the user donates.
#include <Python.h>

#include "cut/cut.h"
#include "cut/graph.h"
#include "cut/reach.h"
#include "tensor/lazy_clone.h"
#include "tensor/tensor_impl.h"

namespace torch_xla {

// By positions in a graph what somebody outside of it wants to keep, and whose tensors were overwritten.
struct Graph::Holders {
  explicit Holders(const Graph& graph)
      : overwritten(graph.leaves.size(), false), kept(graph.leaves.size(), false), base(graph.nodes.size() + 1, 0) {
    for (size_t i = 0; i < graph.nodes.size(); ++i) {
      base[i + 1] = base[i] + static_cast<uint32_t>(graph.nodes[i]->outs->metas.size());
    }
    output_at.assign(base.back(), -1);
    for (size_t i = 0; i < graph.outputs.size(); ++i) {
      output_at[base[graph.results[i].from] + graph.results[i].index] = static_cast<int32_t>(i);
    }
  }
  bool lets_go(size_t node) const { return base[node + 1] - base[node] == 1 && output_at[base[node]] >= 0; }

  Vector<bool> overwritten;   // leaves
  Vector<bool> kept;          // leaves
  Vector<uint32_t> base;      // per node where its first result is in `output_at`
  Vector<int32_t> output_at;  // per result of the nodes which output it is, or -1
};

// Counts which tensors hold nodes of the graph, and finds the leaves whose tensors were overwritten, with what these
// have instead.
Graph::Holders Graph::find_holders(const Cut& cut) {
  Holders holders(*this);
  const auto epoch = latest_epoch();
  Vector<bool> held_once(leaves.size(), false);
  Written written;
  const auto slot_of = [&](const Value& value) -> int64_t {
    const auto& node = *value.node;
    return node.epoch == epoch && node.leaf() && node.slot < leaves.size() && leaves[node.slot].get() == &node
               ? static_cast<int64_t>(node.slot)
               : -1;
  };
  for_each_storage(device, [&](Storage& s) {
    for (const auto* holder : {&s.value, &s.committed, &s.pending_commit}) {
      if (*holder && holder->node->epoch == epoch) {
        ++holder->node->references;
      }
    }
    const auto saved = cut.until == Cut::kNow ? std::nullopt : value_at_cut(s, written);
    if (saved && *saved && !(*saved == s.value)) {
      if (const auto slot = slot_of(*saved); slot >= 0) {
        holders.kept[slot] = true;
      }
    }
    if (const auto slot = slot_of(s.value); slot >= 0) {
      if (s.value.node->donor && !held_once[slot]) {
        held_once[slot] = true;
      } else {
        holders.kept[slot] = true;  // still a tensor's value
      }
    }
    // A failure gives a tensor its value at the last barrier back, which it must not have lost to an older graph: what
    // was written since that was cut must have a value at the cut.
    const auto slot = s.committed ? slot_of(s.committed) : -1;
    if (slot < 0 || s.committed == s.value || cut.donate != Cut::Donate::kOverwritten) {
      return;
    }
    const bool here = s.value.node->sequence < cut.until;
    const auto* const value = here ? &s.value : saved && *saved ? &*saved : nullptr;
    const auto output = value != nullptr && value->node->epoch == epoch && !value->node->leaf()
                            ? holders.output_at[holders.base[value->node->slot] + value->index]
                            : -1;
    if (here || output >= 0) {
      holders.overwritten[slot] = true;
      aliased_outputs[slot] = output;
    } else {
      holders.kept[slot] = true;
    }
  });
  return holders;
}

// A node that someone outside this graph holds, and that does not let its inputs go, keeps them alive.
void Graph::keep_inputs(Holders& holders) const {
  Vector<bool> kept(nodes.size(), false);
  for (size_t i = nodes.size(); i-- > 0;) {
    if (!holders.lets_go(i) && (kept[i] || nodes[i].use_count() > nodes[i]->references + nodes[i]->cuts)) {
      for (const auto& edge : edges_of(i)) {
        (edge.leaf ? holders.kept : kept)[edge.from] = true;
      }
    }
  }
}

// A program may write over a buffer if the tensor that held it at the last barrier has been overwritten since, or the
// user donates it, and no one else can still reach it.
void Graph::find_donations(const Cut& cut) {
  aliased_outputs.assign(leaves.size(), -1);
  auto holders = find_holders(cut);
  keep_inputs(holders);
  for (size_t i = 0; i < leaves.size(); ++i) {
    const auto& leaf = *leaves[i];
    donated[i] = (holders.overwritten[i] || leaf.donor) && !holders.kept[i] &&
                 leaves[i].use_count() == leaf.references + bufferless_clones(leaf) + leaf.cuts;
  }
}

void Graph::hash_donations() {
  for (size_t i = 0; i < leaves.size(); ++i) {
    const auto how = donated[i] ? static_cast<uint64_t>(aliased_outputs[i] + 2) : uint64_t{0};
    key.mix(how);
    topology.mix(how);
  }
}

void Graph::keep_clones_of_donors() const {
  Vector<NodePtr> donors;
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (donated[i] && leaves[i]->donor) {
      donors.push_back(leaves[i]);
    }
  }
  if (!donors.empty()) {
    fetch_clones(clones_to_fetch(donors, Vector<bool>(donors.size(), true)));
  }
}

void Graph::release_donors() {
  for (size_t i = 0; i < leaves.size(); ++i) {
    auto& leaf = *leaves[i];
    if (!donated[i] || !leaf.donor) {
      continue;
    }
    leaf.donor = false;
    release_object(std::exchange(leaf.buffer, nullptr));
    leaf.source = c10::make_intrusive<Lost>(
        "[donation] got a tensor whose buffer was given to a program, which has written over it; give it a new value");
  }
}

bool set_buffer_donor(const at::Tensor& tensor, bool donor) {
  TORCH_CHECK(is_xla(tensor), "[donation] got a tensor on ", tensor.device(), ", expected one on xla");
  const RecorderLock lock;
  auto& alias = impl_of(tensor)->alias;
  resolve(alias.storage->value);
  auto& node = *alias.storage->value.node;
  if (alias.path.defined() || !node.leaf() || node.is(Source::Kind::NumberFill) || node.is(Source::Kind::Lost)) {
    return false;
  }
  node.donor = donor;
  return true;
}

bool is_buffer_donor(const at::Tensor& tensor) {
  const RecorderLock lock;
  return is_xla(tensor) && impl_of(tensor)->alias.storage->value.node->donor;
}

}  // namespace torch_xla
