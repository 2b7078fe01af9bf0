#include "cut/graph.h"

#include <Python.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <unordered_map>
#include <unordered_set>

#include "base/metric.h"
#include "cut/reach.h"
#include "ir/host_cost.h"
#include "ir/op_info.h"
#include "loops/call_trace.h"
#include "tensor/lazy_clone.h"
#include "tensor/placeholder.h"
#include "tensor/placement.h"
#include "tensor/tensor_impl.h"
#include "tensor/write_log.h"

namespace torch_xla {

namespace {

// The node sequence at the cut of each device's latest barrier that runs or was run; one that was interrupted, or did
// not fit into memory, is still to come.
std::array<uint64_t, kMaxDevices> last_barrier{};

// How often results came or were taken back, or a background run began: what was cut before is stale.
std::array<uint64_t, kMaxDevices> changes{};

}  // namespace

void note_change(c10::DeviceIndex device) { ++changes[device]; }
uint64_t changes_of(c10::DeviceIndex device) { return changes[device]; }

void Graph::check() const {
  const RecorderLock lock;
  if ((!captured_ && change_ != changes_of(device)) || purpose_ == Cut::Purpose::kAsk) {
    throw StaleGraph();
  }
}

void Graph::begin() {
  check();
  const RecorderLock lock;
  remember();
}

// To be destroyed after the lock is gone.
void Graph::drop(Value value) {
  if (value) {
    resolve(value);
    ++value.node->cuts;
    dropped_values_.push_back(std::move(value));
  }
}

// Views that know a value keep the graph behind it, and other threads record with it while it runs. What is read is the
// view's own result. Where the graph is not to be run, what they hold is counted as if they had forgotten it.
void Graph::forget_views(bool at_once) {
  const auto is_read = [&](const Value& v) {
    return scope_ == Cut::Scope::kLive && std::find(outputs.begin(), outputs.end(), v) != outputs.end();
  };
  for_each_remembered(device, scope_ == Cut::Scope::kNeeded ? 0 : until_, [&](ViewStep& step) {
    resolve(step.value);
    if (is_read(step.value)) {
      return;
    }
    if (at_once) {
      drop(step.forget());
    } else {
      step.value.node->references += step.value.node->epoch == latest_epoch() ? 1 : 0;
    }
  });
}

void Graph::remember() {
  if (std::exchange(begun_, true)) {
    return;
  }
  remember_numbers();
  if (barrier_sequence_ != 0) {
    Written written;
    for_each_storage(device, [&](Storage& s) {
      auto value = value_at_cut(s, written);
      if (!value) {
        drop(std::exchange(s.committed, {}));
      }
      drop(std::exchange(s.pending_commit, value ? std::move(*value) : Value()));
    });
  }
}

const std::shared_ptr<const ScalarLayout>& Graph::scalar_layout() {
  if (scalar_layout_ == nullptr) {
    // Settings that are equal by chance mostly go to other operators, or the results do: the roles tell them apart.
    scalar_layout_ = std::make_shared<const ScalarLayout>(numbers, roles());
  }
  return scalar_layout_;
}

bool Graph::adopt_scalar_layout(const std::shared_ptr<const ScalarLayout>& other) {
  const bool holds = other->holds(numbers);
  scalar_layout_ = holds ? other : std::make_shared<const ScalarLayout>(other->unbroken(numbers));
  return holds;
}

bool Graph::has_collectives() const {
  return std::any_of(nodes.begin(), nodes.end(),
                     [](const NodePtr& n) { return n->op->name == "xla.collective.default"; });
}

bool Graph::fits_host() const {
  if (nodes.size() > kHostGraph.operators) {
    return false;
  }
  HostCost cost;
  for (const auto& node : nodes) {
    cost.add(*node);
  }
  for (const auto& leaf : leaves) {
    cost.values += HostCost::values_of(*leaf);
  }
  const bool views = std::all_of(nodes.begin(), nodes.end(), [](const NodePtr& n) { return n->op->view; });
  return cost.within(leaves.empty() ? kHostConstants
                     : views        ? kHostViews
                                    : kHostGraph) &&
         std::none_of(nodes.begin(), nodes.end(), [](const NodePtr& n) { return n->seeded; });
}

int64_t Graph::unreferenced_bytes() const {
  const RecorderLock lock;
  std::unordered_set<const Node*> tensor_leaves;
  for_each_storage(device, [&](const Storage& s) { tensor_leaves.insert(s.value.node.get()); });
  int64_t bytes = 0;
  for (const auto& leaf : leaves) {
    bytes += tensor_leaves.count(leaf.get()) != 0 ? 0 : leaf->meta(0).bytes;
  }
  return bytes;
}

void Graph::attach(Vector<Result> values) {
  static auto& sizes = metric("TensorsGraphSize");
  if (!nodes.empty()) {
    sizes.add(static_cast<double>(nodes.size()), "count");
  }
  TORCH_CHECK(values.size() == outputs.size(), "[attach] got ", values.size(), " results, expected ", outputs.size());
  Vector<Value> garbage;
  Vector<Value> replaced;
  {
    const RecorderLock lock;
    note_change(device);
    end_barrier();
    if (scope_ == Cut::Scope::kLive && !nodes.empty()) {
      call_trace_of(device).read(nodes.size());
    }
    release_donors();
    for (size_t i = 0; i < outputs.size(); ++i) {
      values[i].give_to(outputs[i].node->replace(outputs[i].index, garbage));
    }
    const auto epoch = next_epoch();
    for_each_storage(device, [&](Storage& s) {
      resolve(s.value);
      const bool shared = s.value.node->epoch == epoch && is_cloneable(*s.value.node);  // an older tensor has it
      if (s.value.node->leaf()) {
        s.commit(shared ? clone_leaf(s.value, {}) : s.value, replaced);
      }
      s.settle(replaced);
      s.value.node->epoch = epoch;
    });
  }
  clear();
}

bool Graph::begin_async() {
  const RecorderLock lock;
  if (barrier_sequence_ == 0) {
    return false;
  }
  last_barrier[device] = barrier_sequence_;
  note_change(device);
  change_ = changes_of(device);  // for others alone
  return true;
}

void Graph::end_barrier() {
  if (barrier_sequence_ != 0) {
    last_barrier[device] = barrier_sequence_;
    forget_writes(device, barrier_sequence_);
    call_trace_of(device).drop_ends(barrier_sequence_);
  }
}

std::optional<Value> Graph::value_at_cut(const Storage& s, Written& written) const {
  if (s.value.node->sequence < until_) {
    return s.value == s.committed ? Value() : s.value;
  }
  if (!written) {
    written.emplace();
    for (const auto& write : writes(device)) {
      if (write.when > until_) {
        break;
      }
      (*written)[write.storage] = write.value;
    }
  }
  const auto write = written->find(s.id);
  if (write == written->end() && s.first_value.node >= until_) {
    return Value();
  }
  const auto& id = write != written->end() ? write->second : s.first_value;
  const auto same = [&](const NodePtr& node) { return node->sequence == id.node; };
  const auto node =
      std::partition_point(nodes.begin(), nodes.end(), [&](const NodePtr& n) { return n->sequence < id.node; });
  if (node != nodes.end() && same(*node)) {
    return Value{*node, id.index};
  }
  const auto leaf = std::find_if(leaves.begin(), leaves.end(), same);
  if (leaf != leaves.end()) {
    return Value{*leaf, 0};
  }
  return write != written->end() ? std::nullopt : std::optional(Value());
}

std::vector<std::vector<uint32_t>> Graph::resident_stacks() const {
  std::vector<std::pair<const Pack*, std::vector<uint32_t>>> found;
  for (uint32_t i = 0; i < leaves.size(); ++i) {
    const auto* const pack = pack_of(*leaves[i]);
    if (pack != nullptr && pack->layout->stacked) {
      auto entry = std::find_if(found.begin(), found.end(), [&](const auto& e) { return e.first == pack; });
      if (entry == found.end()) {
        entry = found.insert(entry, {pack, std::vector<uint32_t>(pack->layout->shapes.size(), i)});
      }
      entry->second.at(leaves[i]->source_index) = i;
    }
  }
  std::vector<std::vector<uint32_t>> whole;
  for (auto& [pack, slots] : found) {
    if (pack->holds(leaves, slots)) {
      whole.push_back(std::move(slots));
    }
  }
  return whole;
}

// Adds to the `cuts` of all nodes that the graph itself holds, once per reference.
void Graph::count_references(int32_t by) const {
  for (const auto* list : {&nodes, &leaves}) {
    for (const auto& node : *list) {
      node->cuts += by;
    }
  }
  for (const auto* list : {&outputs, &dropped_values_}) {
    for (const auto& value : *list) {
      value.node->cuts += by;
    }
  }
}

void Graph::clear() {
  if (!captured_ && !(nodes.empty() && dropped_values_.empty())) {
    const RecorderLock lock;
    count_references(-1);
  }
  while (!nodes.empty()) {
    nodes.pop_back();  // the latest first, so that none is the last to hold its inputs
  }
  dropped_values_.clear();
  leaves.clear();
  edges_.clear();
  first_edge_.clear();
  outputs.clear();
  results.clear();
  stacks.clear();
}

bool is_lost(const at::Tensor& tensor) {
  const RecorderLock lock;
  return is_xla(tensor) && impl_of(tensor)->alias.storage->value.node->is(Source::Kind::Lost);
}

bool has_pending(c10::DeviceIndex device, uint64_t until) {
  const RecorderLock lock;
  const auto since = last_barrier[device];  // what is older runs, or waits for placeholders
  return since != node_sequence() && any_storage(device, [&](const Storage& s) {
           const auto& node = *s.value.node;
           return !node.leaf() && since <= node.sequence && node.sequence < until;
         });
}

namespace {

NodePtr current_node(const at::Tensor& tensor) {
  const RecorderLock lock;
  return impl_of(tensor)->alias.current().node;
}

}  // namespace

PyObject* buffer_of(const at::Tensor& tensor) {
  TORCH_CHECK(is_xla(tensor), "[tensor] got a tensor on ", tensor.device(), ", expected one on xla");
  const auto node = current_node(tensor);
  fetch_buffer(node);
  Py_XINCREF(node->buffer);
  return node->buffer;
}

Location location_of(const at::Tensor& tensor) {
  auto location = locate(current_node(tensor));
  Py_XINCREF(location.buffer);
  return location;
}

std::optional<at::Tensor> copy_on_host(const at::Tensor& tensor) {
  at::Tensor values;
  {
    const RecorderLock lock;
    const auto* const on_host = find_values(*impl_of(tensor)->alias.current().node).values;
    values = on_host != nullptr ? *on_host : at::Tensor();
  }
  return values.defined() ? std::optional<at::Tensor>(values.clone()) : std::nullopt;
}

}  // namespace torch_xla
