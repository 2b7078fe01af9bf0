#include "cut/cut.h"

#include <algorithm>
#include <iterator>

#include "cut/graph.h"
#include "cut/reach.h"
#include "device/device.h"
#include "ir/host_cost.h"
#include "tensor/placeholder.h"
#include "tensor/tensor_impl.h"

namespace torch_xla {

namespace {

// What comes from placeholders stays pending: it is there to be traced, and what else is pending must run.
void leave_traced(Vector<Value>& roots) {
  if (!any_placeholders()) {
    return;
  }
  auto nodes = reach(roots);
  sort_by_sequence(nodes);
  const auto traced = [](const Value& v) {
    return v.node->leaf() ? v.node->is(Source::Kind::Placeholder) : v.node->marked;
  };
  for (auto* node : nodes) {
    node->marked = std::any_of(node->inputs.begin(), node->inputs.end(), traced);
  }
  roots.erase(std::remove_if(roots.begin(), roots.end(), traced), roots.end());
  next_epoch();
}

// Adds as outputs other values that are alive (saved activations, parameters) or that pending nodes need: else the next
// graph computes them again, and where each turn of a loop reads, graphs would grow with each turn. A graph that the
// host may compute is too small for the latter to matter, and what is pending keeps its key.
void add_live(c10::DeviceIndex device, Vector<Value>& roots) {
  const auto needed = reach(roots);
  const auto reached = latest_epoch();
  Vector<Value> rest;
  for_each_storage(device, [&](Storage& s) {
    resolve(s.value);
    if (!s.value.node->leaf()) {
      (s.value.node->epoch == reached ? roots : rest).push_back(s.value);
    }
  });
  // A fill that lives on must be a leaf here as it will be at the barrier.
  for_each_storage(device, [&](Storage& s) {
    if (s.initial_fill && s.initial_fill.node->epoch == reached) {
      s.commit_fill();
    }
  });
  if (needed.size() > kHostGraph.operators) {
    for (auto* const node : needed) {
      node->marked = true;
    }
    for (const auto* const node : reach(rest)) {  // without what is marked already
      std::copy_if(node->inputs.begin(), node->inputs.end(), std::back_inserter(roots),
                   [](const Value& v) { return v.node->marked; });
    }
  }
  next_epoch();
}

// Replaces roots that were recorded at `until` or later by the earlier values that they need.
void go_back(uint64_t until, Vector<Value>& roots) {
  const auto later = [&](const Value& v) { return v.node->sequence >= until; };
  Vector<Value> crossing;
  for (const auto* const node : reach(roots)) {
    if (node->sequence >= until) {
      std::copy_if(node->inputs.begin(), node->inputs.end(), std::back_inserter(crossing),
                   [&](const Value& v) { return !later(v) && !v.node->leaf(); });
    }
  }
  roots.erase(std::remove_if(roots.begin(), roots.end(), later), roots.end());
  std::move(crossing.begin(), crossing.end(), std::back_inserter(roots));
  next_epoch();
}

void add_pending(const Cut& cut, Vector<Value>& roots) {
  for_each_storage(cut.device, [&](Storage& s) {
    if (!cut.captured && s.initial_fill && s.initial_fill.node->sequence < cut.until) {
      s.commit_fill();
    }
    resolve(s.value);
    if (!s.value.node->leaf()) {
      roots.push_back(s.value);
    }
  });
  leave_traced(roots);
  if (cut.until != Cut::kNow) {
    go_back(cut.until, roots);
  }
}

}  // namespace

Cut Cut::of_device(c10::DeviceIndex device, uint64_t until) {
  return {device, {}, {}, Scope::kPending, until, Donate::kOverwritten};
}

Cut Cut::of_capture(c10::DeviceIndex device) {
  auto cut = of_device(device);
  cut.captured = true;
  return cut;
}

Cut Cut::of_tensors(const std::vector<at::Tensor>& tensors, Scope scope, Donate donate) {
  for (const auto& t : tensors) {
    TORCH_CHECK(is_xla(t), "[graph] got a tensor on ", t.device(), ", expected tensors on xla");
  }
  return {tensors.empty() ? c10::DeviceIndex{0} : tensors.back().device().index(), tensors, {}, scope, kNow, donate};
}

std::optional<Cut> Cut::roots_only() const {
  const auto one = [](const at::Tensor& t) { return t.numel() == 1; };
  if (tensors.empty() || !std::all_of(tensors.begin(), tensors.end(), one)) {
    return {};
  }
  return of_tensors(tensors, Scope::kNeeded, Donate::kNothing);
}

Graph Cut::graph(Purpose purpose) const { return {*this, purpose}; }

Graph::Graph(const Cut& cut, Cut::Purpose purpose)
    : scope_(cut.scope), until_(std::min(cut.until, node_sequence())), captured_(cut.captured), purpose_(purpose) {
  device = cut.device;
  const bool pending = cut.scope == Cut::Scope::kPending;
  TORCH_CHECK(pending || cut.until == Cut::kNow,
              "[graph] a cut of chosen tensors with an end, expected one of all that is pending");
  const RecorderLock lock;
  if (pending && !cut.captured) {
    barrier_sequence_ = until_;
  }
  next_epoch();
  auto roots = cut.values;
  for (const auto& t : cut.tensors) {
    roots.push_back(impl_of(t)->alias.current());
  }
  if (pending) {
    add_pending(cut, roots);
  } else if (cut.scope == Cut::Scope::kLive) {
    add_live(device, roots);
  }
  collect(std::move(roots));
  count_references(1);
  forget_views(purpose == Cut::Purpose::kRun);
  if (cut.donate != Cut::Donate::kNothing) {
    find_donations(cut);
  }
  if (spans_mesh()) {
    find_output_placements();
  }
  find_numbers();
  references.reserve(nodes.size());
  for (const auto& node : nodes) {
    references.push_back(node->references);
  }
  change_ = changes_of(device);
  if (captured_) {  // each replay needs what it holds
    count_references(-1);
  }
}

void Graph::collect(Vector<Value> roots) {
  auto reached = reach(roots);
  sort_by_sequence(reached);
  nodes.reserve(reached.size());
  for (uint32_t i = 0; i < reached.size(); ++i) {
    reached[i]->slot = i;
    nodes.push_back(NodePtr::reclaim_copy(reached[i]));
  }
  for (auto& root : roots) {
    resolve(root);
    if (!root.node->leaf()) {
      outputs.push_back(std::move(root));
    }
  }
  std::sort(outputs.begin(), outputs.end(), [](const Value& a, const Value& b) {
    return a.node->sequence != b.node->sequence ? a.node->sequence < b.node->sequence : a.index < b.index;
  });
  outputs.erase(std::unique(outputs.begin(), outputs.end()), outputs.end());
  connect();
}

}  // namespace torch_xla
