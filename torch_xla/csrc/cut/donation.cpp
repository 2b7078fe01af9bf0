// Which buffers a program may write over: those of overwritten tensors, and those that were given away.
#include <Python.h>

#include "cut/cut.h"
#include "cut/graph.h"
#include "cut/reach.h"
#include "tensor/lazy_clone.h"
#include "tensor/tensor_impl.h"

namespace torch_xla {

// Counts who holds the nodes of the graph, pins the leaves that somebody wants to keep, and finds those whose tensors
// were overwritten, with what these have instead.
void Graph::mark_holders(const Cut& cut, Vector<bool>& overwritten) {
  const auto epoch = latest_epoch();
  Vector<bool> held_once(leaves.size(), false);
  // Position of each node's first result in a table of all results, which tells the outputs among them.
  Vector<uint32_t> base(nodes.size() + 1, 0);
  for (size_t i = 0; i < nodes.size(); ++i) {
    base[i + 1] = base[i] + static_cast<uint32_t>(nodes[i]->outs->metas.size());
  }
  Vector<int32_t> output_at(base.back(), -1);
  for (size_t i = 0; i < outputs.size(); ++i) {
    output_at[base[outputs[i].node->slot] + outputs[i].index] = static_cast<int32_t>(i);
  }
  const auto slot_of = [&](const Node& node) -> int64_t {
    return node.epoch == epoch && node.leaf() && node.slot < leaves.size() && leaves[node.slot].get() == &node
               ? static_cast<int64_t>(node.slot)
               : -1;
  };
  for_each_storage(device, [&](Storage& s) {
    for (const auto* held : {&s.value, &s.synced, &s.at_barrier}) {
      if (*held && held->node->epoch == epoch) {
        ++held->node->references;
      }
    }
    if (s.at_barrier && s.at_barrier.node->leaf() && !(s.at_barrier == s.value)) {
      s.at_barrier.node->pinned = true;
    }
    if (s.value.node->epoch == epoch && s.value.node->leaf()) {
      const auto slot = s.value.node->given ? slot_of(*s.value.node) : -1;
      if (slot >= 0 && !held_once[slot]) {
        held_once[slot] = true;
      } else {
        s.value.node->pinned = true;  // still a tensor's value
      }
    }
    // A failure gives a tensor its value at the last barrier back, which it must not have lost to an older graph: what
    // was written since that was cut must have a value at the cut.
    const auto slot = s.synced ? slot_of(*s.synced.node) : -1;
    if (slot < 0 || s.synced == s.value || cut.donate != Cut::Donate::kOverwritten) {
      return;
    }
    const bool here = s.value.node->sequence < cut.until;
    const auto& value = here ? s.value : s.at_barrier;
    const auto output = value && value.node->epoch == epoch && !value.node->leaf()
                            ? output_at[base[value.node->slot] + value.index]
                            : -1;
    if (here || output >= 0) {
      overwritten[slot] = true;
      successors[slot] = output;
    } else {
      s.synced.node->pinned = true;
    }
  });
  for (const auto* ours : {&outputs, &forgotten_}) {
    for (const auto& value : *ours) {
      if (value.node->epoch == epoch) {
        ++value.node->references;
      }
    }
  }
}

// A node that someone outside this graph holds, and that does not become a leaf, keeps its inputs alive.
void Graph::pin_inputs() {
  for (size_t i = nodes.size(); i-- > 0;) {
    auto& node = *nodes[i];
    const bool becomes_leaf = node.output && node.outs->metas.size() == 1;
    const bool held = !becomes_leaf && nodes[i].use_count() > node.references + 1;
    if (held || (node.pinned && !becomes_leaf)) {
      for (const auto& input : node.inputs) {
        input.node->pinned = true;
      }
    }
  }
}

// A program may write over a buffer if the tensor that held it at the last barrier has been overwritten since, or gave
// it away, and no one else can still reach it.
void Graph::find_donations(const Cut& cut) {
  successors.assign(leaves.size(), -1);
  Vector<bool> overwritten(leaves.size(), false);
  mark_holders(cut, overwritten);
  pin_inputs();
  for (size_t i = 0; i < leaves.size(); ++i) {
    const auto& leaf = *leaves[i];
    donated[i] = (overwritten[i] || leaf.given) && !leaf.pinned &&
                 leaves[i].use_count() == leaf.references + waiting_clones(leaf) + 1;
    const auto how = donated[i] ? static_cast<uint64_t>(successors[i] + 2) : uint64_t{0};
    key.mix(how);
    form.mix(how);
  }
}

void Graph::take_given() {
  for (size_t i = 0; i < leaves.size(); ++i) {
    auto& leaf = *leaves[i];
    if (!donated[i] || !leaf.given) {
      continue;
    }
    leaf.given = false;
    leaf.source = {};
    release_object(std::exchange(leaf.buffer, nullptr));
    leaf.error = std::make_unique<std::string>(
        "[donation] got a tensor whose buffer was given to a program, which has written over it; give it a new value");
  }
}

bool give_buffer(const at::Tensor& tensor, bool give) {
  TORCH_CHECK(is_xla(tensor), "[donation] got a tensor on ", tensor.device(), ", expected one on xla");
  const RecorderLock lock;
  auto& alias = impl_of(tensor)->alias;
  resolve(alias.storage->value);
  auto& node = *alias.storage->value.node;
  if (alias.path.defined() || !node.leaf() || node.unfilled() || node.error != nullptr) {
    return false;
  }
  node.given = give;
  return true;
}

bool is_given(const at::Tensor& tensor) {
  const RecorderLock lock;
  return is_xla(tensor) && impl_of(tensor)->alias.storage->value.node->given;
}

}  // namespace torch_xla
