#include "cut/graph.h"

#include <Python.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <unordered_set>

#include "base/metric.h"
#include "ir/op_info.h"
#include "tensor/lazy_clone.h"
#include "tensor/placeholder.h"
#include "tensor/tensor_impl.h"

namespace torch_xla {

namespace {

uint64_t epoch = 0;  // of the latest collection; under the recorder's lock

// Marks everything `roots` need and returns the nodes of it that are to be computed. An explicit stack: a chain may be
// a million nodes long.
Vector<Node*> reach(Vector<Value>& roots) {
  Vector<Node*> found;
  Vector<Node*> stack;
  const auto visit = [&](Value& value) {
    resolve(value);
    if (value.node->epoch != epoch) {
      merge_clone(value);
    }
    auto* const node = value.node.get();
    if (node->epoch != epoch) {
      node->epoch = epoch;
      node->references = 0;
      node->output = false;
      node->pinned = false;
      if (!node->leaf()) {
        stack.push_back(node);
      }
    }
  };
  for (auto& root : roots) {
    visit(root);
  }
  while (!stack.empty()) {
    auto* const node = stack.back();
    stack.pop_back();
    found.push_back(node);
    for (auto& input : node->inputs) {
      visit(input);
    }
  }
  return found;
}

// Puts nodes in recording order. Their numbers are mostly dense, and each then finds its place without a comparison.
void sort_by_sequence(Vector<Node*>& nodes) {
  const auto earlier = [](const Node* a, const Node* b) { return a->sequence < b->sequence; };
  if (nodes.empty()) {
    return;
  }
  const auto [first, last] = std::minmax_element(nodes.begin(), nodes.end(), earlier);
  const auto start = (*first)->sequence;
  const auto span = (*last)->sequence - start + 1;
  if (span > 8 * nodes.size()) {
    std::sort(nodes.begin(), nodes.end(), earlier);
    return;
  }
  Vector<Node*> places(span, nullptr);
  for (auto* node : nodes) {
    places[node->sequence - start] = node;
  }
  std::copy_if(places.begin(), places.end(), nodes.begin(), [](const Node* n) { return n != nullptr; });
}

// What comes from placeholders stays pending: it is there to be traced, and what else is pending must run.
void leave_traced(Vector<Value>& roots) {
  if (!any_placeholders()) {
    return;
  }
  auto nodes = reach(roots);
  sort_by_sequence(nodes);
  const auto traced = [](const Value& v) { return v.node->leaf() ? is_placeholder(*v.node) : v.node->pinned; };
  for (auto* node : nodes) {
    node->pinned = std::any_of(node->inputs.begin(), node->inputs.end(), traced);
  }
  roots.erase(std::remove_if(roots.begin(), roots.end(), traced), roots.end());
  ++epoch;
}

// A tensor made from nothing that still lives becomes a leaf: the first step of an optimizer, whose state it is, then
// has the same graph as the second.
void fill_to_leaf(Storage& s) {
  s.origin.node->op = nullptr;  // keeps its arguments until it gets its buffer
  s.synced = std::move(s.origin);
  s.origin = {};
}

// Takes back what depends on the nodes and leaves for which `bad` holds: a tensor gets the value it had at the last
// barrier, or says why it has none. `roots` are values beside those of tensors that the marks shall be right for. Wants
// the recorder's lock; `old` is to be destroyed after it is gone.
template <class Bad>
void take_back(c10::DeviceIndex device, Vector<Value>& roots, const Bad& bad, const std::string& error,
               Vector<Value>& old) {
  ++epoch;
  auto all = roots;
  for_each_storage(device, [&](Storage& s) {
    resolve(s.value);
    all.push_back(s.value);
  });
  auto nodes = reach(all);
  sort_by_sequence(nodes);
  const auto lost = [&](const Value& v) { return v.node->leaf() ? bad(*v.node) : v.node->pinned; };
  for (auto* node : nodes) {
    node->pinned = bad(*node) || std::any_of(node->inputs.begin(), node->inputs.end(), lost);
  }
  for (auto& root : roots) {
    resolve(root);
  }
  roots.erase(std::remove_if(roots.begin(), roots.end(), lost), roots.end());
  for_each_storage(device, [&](Storage& s) {
    for (auto* held : {&s.origin, &s.synced}) {
      if (*held && lost(*held)) {
        old.push_back(std::exchange(*held, {}));
      }
    }
    if (!lost(s.value)) {
      return;
    }
    old.push_back(std::move(s.value));
    if (s.synced) {
      s.value = s.synced;
    } else {
      s.value = make_leaf(s.meta, nullptr);
      s.value.node->error = std::make_unique<std::string>(error);
    }
    ++s.generation;
  });
  std::move(all.begin(), all.end(), std::back_inserter(old));
}

// What holds a leaf's values, perhaps among others.
PyObject* held_in(const Node& leaf) {
  if (leaf.buffer != nullptr || !leaf.source.defined()) {
    return leaf.buffer;
  }
  if (const auto* const original = leaf.source->original()) {
    return held_in(**original);
  }
  const auto* const pack = leaf.source->pack();
  return pack != nullptr ? pack->buffer : nullptr;
}

// The node sequence at the cut of each device's latest barrier that was run, or failed; one that was interrupted, or
// did not fit into memory, is still to come.
std::array<uint64_t, kMaxDevices> last_cut{};

}  // namespace

uint64_t latest_epoch() { return epoch; }

Graph Graph::of_device(c10::DeviceIndex device, bool barrier) {
  Graph graph;
  graph.device = device;
  const RecorderLock lock;
  if (barrier) {
    forget_views(device, graph.forgotten_);
    graph.cut_at_ = node_sequence();
  }
  ++epoch;
  Vector<Value> roots;
  for_each_storage(device, [&](Storage& s) {
    if (barrier && s.origin) {
      fill_to_leaf(s);
    }
    resolve(s.value);
    if (!s.value.node->leaf() || s.value.node->unfilled()) {
      roots.push_back(s.value);
    }
  });
  if (barrier) {
    leave_traced(roots);
  }
  graph.collect(std::move(roots), barrier);
  graph.find_donations(true);
  if (graph.outputs.empty()) {
    graph.settle();
  }
  return graph;
}

Graph Graph::of_tensors(const std::vector<at::Tensor>& tensors, bool live, bool give) {
  Graph graph;
  const RecorderLock lock;
  ++epoch;
  Vector<Value> roots;
  if (live && !tensors.empty()) {
    forget_views(tensors.front().device().index(), graph.forgotten_);
  }
  for (const auto& t : tensors) {
    TORCH_CHECK(is_xla(t), "[graph] got a tensor on ", t.device(), ", expected tensors on xla");
    roots.push_back(impl_of(t)->alias.current());
    graph.device = t.device().index();
  }
  reach(roots);
  const auto reached = epoch;
  if (!live) {
    ++epoch;
    graph.collect(std::move(roots), false);
    return graph;
  }
  // Whatever else lives inside this subgraph (saved activations, parameters) would be computed again by the next graph.
  for_each_storage(graph.device, [&](Storage& s) {
    resolve(s.value);
    if (s.value.node->epoch == reached && !s.value.node->leaf()) {
      roots.push_back(s.value);
    }
  });
  // A fill that lives on must be a leaf here as it will be at the barrier.
  for_each_storage(graph.device, [&](Storage& s) {
    if (s.origin && s.origin.node->epoch == reached) {
      fill_to_leaf(s);
    }
  });
  ++epoch;
  graph.collect(std::move(roots), true);
  if (give) {
    graph.find_donations(false);
  }
  return graph;
}

void Graph::collect(Vector<Value> roots, bool runs) {
  auto reached = reach(roots);
  sort_by_sequence(reached);
  nodes.reserve(reached.size());
  for (uint32_t i = 0; i < reached.size(); ++i) {
    reached[i]->slot = i;
    nodes.push_back(NodePtr::reclaim_copy(reached[i]));
  }
  for (auto& root : roots) {
    resolve(root);
    if (root.node->leaf()) {
      if (root.node->unfilled()) {
        unused_fills_.push_back(root.node);
      }
    } else {
      outputs.push_back(std::move(root));
    }
  }
  std::sort(outputs.begin(), outputs.end(), [](const Value& a, const Value& b) {
    return a.node->sequence != b.node->sequence ? a.node->sequence < b.node->sequence : a.index < b.index;
  });
  outputs.erase(std::unique(outputs.begin(), outputs.end()), outputs.end());
  number_leaves(runs);
}

const std::shared_ptr<const Sharing>& Graph::sharing() {
  if (sharing_ == nullptr) {
    // Two settings of an optimizer that are equal by chance are given to other operators, or what these make is.
    sharing_ = std::make_shared<const Sharing>(numbers, roles());
  }
  return sharing_;
}

bool Graph::share_as(const std::shared_ptr<const Sharing>& known) {
  const bool holds = known->holds(numbers);
  sharing_ = holds ? known : std::make_shared<const Sharing>(known->unbroken(numbers));
  return holds;
}

Vector<NodePtr> Graph::fills() const {
  Vector<NodePtr> found(unused_fills_);
  std::copy_if(leaves.begin(), leaves.end(), std::back_inserter(found), [](const NodePtr& n) { return n->unfilled(); });
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

bool Graph::has_fills() const {
  return !unused_fills_.empty() ||
         std::any_of(leaves.begin(), leaves.end(), [](const NodePtr& n) { return n->unfilled(); });
}

bool Graph::fits_host() const {
  constexpr size_t kNodes = 24;
  constexpr int64_t kValues = 16384;
  constexpr int64_t kViewedValues = 1 << 18;  // a part of a tensor: each other part would be another program
  if (nodes.size() > kNodes) {
    return false;
  }
  int64_t values = 0;
  const auto count = [&](const NodePtr& node) {
    for (const auto& meta : node->outs->metas) {
      values += meta.defined() ? meta.numel() : 0;
    }
  };
  std::for_each(nodes.begin(), nodes.end(), count);
  std::for_each(leaves.begin(), leaves.end(), count);
  const bool views = std::all_of(nodes.begin(), nodes.end(), [](const NodePtr& n) { return n->op->view; });
  return values <= (views ? kViewedValues : kValues) &&
         std::none_of(nodes.begin(), nodes.end(), [](const NodePtr& n) { return n->seeded; });
}

int64_t Graph::unheld_bytes() const {
  const RecorderLock lock;
  std::unordered_set<const Node*> held;
  for_each_storage(device, [&](const Storage& s) { held.insert(s.value.node.get()); });
  int64_t bytes = 0;
  for (const auto& leaf : leaves) {
    bytes += held.count(leaf.get()) != 0 ? 0 : leaf->meta(0).bytes;
  }
  return bytes;
}

void Graph::attach(Vector<Result> results, bool shared) {
  static auto& sizes = metric("TensorsGraphSize");
  sizes.add(static_cast<double>(nodes.size()), "count");
  TORCH_CHECK(results.size() == outputs.size(), "[attach] got ", results.size(), " results, expected ", outputs.size());
  Vector<Value> garbage;
  Vector<Value> old;
  {
    const RecorderLock lock;
    settle();
    take_given();
    for (size_t i = 0; i < outputs.size(); ++i) {
      auto& node = *outputs[i].node;
      auto* leaf = &node;
      if (node.outs->metas.size() == 1) {
        node.become_leaf(results[i].buffer, garbage);
      } else {
        if (node.forwards == nullptr) {
          node.forwards = std::make_unique<Vector<Value>>(node.outs->metas.size());
        }
        auto& forward = (*node.forwards)[outputs[i].index];
        forward = make_leaf({node.outs, outputs[i].index}, results[i].buffer);
        forward.node->frame = node.frame;
        leaf = forward.node.get();
        if (std::all_of(node.forwards->begin(), node.forwards->end(),
                        [](const Value& v) { return static_cast<bool>(v); })) {
          for (auto& input : node.inputs) {
            garbage.push_back(std::move(input));
          }
          node.inputs.clear();
        }
      }
      leaf->shared = shared;
      leaf->source = std::move(results[i].source);
      leaf->place = results[i].place;
    }
    ++epoch;
    for_each_storage(device, [&](Storage& s) {
      resolve(s.value);
      if (s.value.node->epoch == epoch && is_cloneable(*s.value.node)) {  // an older tensor has it
        old.push_back(std::exchange(s.value, clone_leaf(s.value, {})));
      }
      s.value.node->epoch = epoch;
      if (s.value.node->leaf() && !(s.synced == s.value)) {
        old.push_back(std::move(s.synced));
        s.synced = s.value;
      }
    });
  }
  clear();
}

Graph Part::cut() const {
  Graph graph;
  graph.device = device;
  const RecorderLock lock;
  ++epoch;
  graph.collect(roots, true);
  return graph;
}

std::vector<Part> Graph::abandon(const std::string& error, const std::vector<size_t>& failed_nodes,
                                 const std::vector<size_t>& failed_fills) {
  std::unordered_set<const Node*> bad;
  const auto unfilled = fills();
  for (const auto i : failed_nodes) {
    bad.insert(nodes.at(i).get());
  }
  for (const auto i : failed_fills) {
    bad.insert(unfilled.at(i).get());
  }
  const bool named = !bad.empty();
  if (!named) {
    std::transform(nodes.begin(), nodes.end(), std::inserter(bad, bad.end()), [](const NodePtr& n) { return n.get(); });
  }
  Part rest{device, outputs};
  for (const auto& fill : unused_fills_) {
    rest.roots.push_back({fill, 0});
  }
  Vector<Value> old;
  {
    const RecorderLock lock;
    take_back(device, rest.roots, [&](const Node& n) { return bad.count(&n) != 0; }, error, old);
  }
  clear();
  const auto pending = [](const Value& v) { return v.node->unfilled() || !v.node->leaf(); };
  return named && std::any_of(rest.roots.begin(), rest.roots.end(), pending) ? std::vector<Part>{std::move(rest)}
                                                                             : std::vector<Part>();
}

void Graph::settle() {
  if (cut_at_ != 0) {
    last_cut[device] = cut_at_;
  }
}

void Graph::clear() {
  while (!nodes.empty()) {
    nodes.pop_back();  // the latest first, so that none is the last to hold its inputs
  }
  leaves.clear();
  outputs.clear();
  unused_fills_.clear();
}

std::vector<PyObject*> buffers_on(c10::DeviceIndex device) {
  std::unordered_set<PyObject*> found;
  Vector<Value> roots;  // destroyed after the lock is gone
  const RecorderLock lock;
  const auto add = [&](const Value& v) {
    auto* const buffer = v && v.node->leaf() ? held_in(*v.node) : nullptr;
    if (buffer != nullptr) {
      found.insert(buffer);
    }
  };
  ++epoch;
  for_each_storage(device, [&](Storage& s) {
    resolve(s.value);
    add(s.synced);
    roots.push_back(s.value);
  });
  for (const auto* const node : reach(roots)) {
    std::for_each(node->inputs.begin(), node->inputs.end(), add);
  }
  std::for_each(roots.begin(), roots.end(), add);
  for (auto* const buffer : found) {
    Py_INCREF(buffer);
  }
  return {found.begin(), found.end()};
}

void lose_buffers(c10::DeviceIndex device, const std::vector<PyObject*>& buffers, const std::string& error) {
  const std::unordered_set<PyObject*> failed(buffers.begin(), buffers.end());
  Vector<Value> none;
  Vector<Value> old;
  const RecorderLock lock;
  take_back(device, none, [&](const Node& n) { return n.leaf() && failed.count(held_in(n)) != 0; }, error, old);
}

bool is_lost(const at::Tensor& tensor) {
  const RecorderLock lock;
  return is_xla(tensor) && impl_of(tensor)->alias.storage->value.node->error != nullptr;
}

bool has_pending(c10::DeviceIndex device) {
  const RecorderLock lock;
  if (last_cut[device] == node_sequence()) {
    return false;  // nothing at all was recorded since
  }
  return any_storage(device, [](const Storage& s) { return !s.value.node->leaf() || s.value.node->unfilled(); });
}

PyObject* buffer_of(const at::Tensor& tensor) {
  TORCH_CHECK(is_xla(tensor), "[tensor] got a tensor on ", tensor.device(), ", expected one on xla");
  NodePtr node;
  {
    const RecorderLock lock;
    node = impl_of(tensor)->alias.current().node;
  }
  fetch_buffer(node);
  Py_XINCREF(node->buffer);
  return node->buffer;
}

Location location_of(const at::Tensor& tensor) {
  NodePtr node;
  {
    const RecorderLock lock;
    node = impl_of(tensor)->alias.current().node;
  }
  auto location = locate(node);
  Py_XINCREF(location.buffer);
  return location;
}

}  // namespace torch_xla
