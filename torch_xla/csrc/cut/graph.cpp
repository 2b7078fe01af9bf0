#include "cut/graph.h"

#include <Python.h>

#include <algorithm>
#include <array>
#include <iterator>
#include <unordered_map>
#include <unordered_set>

#include "base/metric.h"
#include "cut/reach.h"
#include "ir/op_info.h"
#include "loops/stream.h"
#include "tensor/lazy_clone.h"
#include "tensor/placeholder.h"
#include "tensor/placement.h"
#include "tensor/tensor_impl.h"
#include "tensor/write_log.h"

namespace torch_xla {

namespace {

// The node sequence at the cut of each device's latest barrier that runs or was run; one that was interrupted, or did
// not fit into memory, is still to come.
std::array<uint64_t, kMaxDevices> last_cut{};

// How often the nodes of a device's graphs were changed: by a cut, which decides on their numbers, or by results.
std::array<uint64_t, kMaxDevices> changes{};

}  // namespace

void note_change(c10::DeviceIndex device) { ++changes[device]; }
uint64_t changes_of(c10::DeviceIndex device) { return changes[device]; }

void Graph::check() {
  const RecorderLock lock;
  if (change_ != changes_of(device)) {
    throw StaleGraph();
  }
  if (epoch_ == latest_epoch()) {
    return;
  }
  for (uint32_t i = 0; i < nodes.size(); ++i) {  // another walk has numbered them since
    nodes[i]->slot = i;
  }
  for (uint32_t i = 0; i < leaves.size(); ++i) {
    leaves[i]->slot = i;
  }
  epoch_ = latest_epoch();
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
  // As recorded: the processes of a job number what they put on their devices, and addresses differ between them.
  std::sort(found.begin(), found.end(), [](const NodePtr& a, const NodePtr& b) { return a->sequence < b->sequence; });
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

bool Graph::has_fills() const {
  return !unused_fills_.empty() ||
         std::any_of(leaves.begin(), leaves.end(), [](const NodePtr& n) { return n->unfilled(); });
}

bool Graph::fits_host() const {
  constexpr int64_t kValues = 16384;
  constexpr int64_t kViewedValues = 1 << 18;    // a part of a tensor: each other part would be another program
  constexpr int64_t kConstantValues = 1 << 20;  // without inputs: computed once, such as a check of all positions
  if (nodes.size() > kMostHostNodes) {
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
  const auto most = leaves.empty() ? kConstantValues : views ? kViewedValues : kValues;
  return values <= most && std::none_of(nodes.begin(), nodes.end(), [](const NodePtr& n) { return n->seeded; });
}

size_t Graph::small_operators() const {
  constexpr int64_t kValues = 1024;
  int64_t values = 0;
  for (const auto& node : nodes) {
    for (const auto& meta : node->outs->metas) {
      values += meta.defined() ? meta.numel() : 0;
    }
  }
  return values <= kValues * static_cast<int64_t>(nodes.size()) ? nodes.size() : 0;
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

void Graph::attach(Vector<Result> results) {
  static auto& sizes = metric("TensorsGraphSize");
  sizes.add(static_cast<double>(nodes.size()), "count");
  TORCH_CHECK(results.size() == outputs.size(), "[attach] got ", results.size(), " results, expected ", outputs.size());
  Vector<Value> garbage;
  Vector<Value> old;
  {
    const RecorderLock lock;
    note_change(device);
    settle();
    if (read_) {
      stream_of(device).read(nodes.size());
    }
    take_given();
    for (size_t i = 0; i < outputs.size(); ++i) {
      auto& node = *outputs[i].node;
      auto* leaf = &node;
      if (node.outs->metas.size() == 1) {
        node.become_leaf(garbage);
      } else {
        if (node.forwards == nullptr) {
          node.forwards = std::make_unique<Vector<Value>>(node.outs->metas.size());
        }
        auto& forward = (*node.forwards)[outputs[i].index];
        forward = make_leaf({node.outs, outputs[i].index}, nullptr);
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
      results[i].give_to(*leaf);
    }
    const auto epoch = next_epoch();
    for_each_storage(device, [&](Storage& s) {
      resolve(s.value);
      if (s.value.node->epoch == epoch && is_cloneable(*s.value.node)) {  // an older tensor has it
        old.push_back(std::exchange(s.value, clone_leaf(s.value, {})));
      }
      s.value.node->epoch = epoch;
      if (s.value.node->leaf() && s.placement == kAnywhere) {
        s.placement = s.value.node->placement;
      }
      s.take_synced(old);
      if (s.value.node->leaf() && !(s.synced == s.value)) {
        old.push_back(std::exchange(s.synced, s.value));
      }
    });
  }
  clear();
}

bool Graph::let_record() {
  const RecorderLock lock;
  if (cut_at_ != 0) {
    last_cut[device] = cut_at_;
  }
  return cut_at_ != 0;
}

void Graph::settle() {
  if (cut_at_ != 0) {
    last_cut[device] = cut_at_;
    forget_writes(device, cut_at_);
    stream_of(device).drop_ends(cut_at_);
  }
}

// Each storage keeps the value it has at this barrier, which a failure of a later graph gives it back.
void Graph::keep_values(uint64_t until) {
  std::unordered_map<uint64_t, ValueId> written;  // by storage, before a cut that lies further back
  for (const auto& write : writes(device)) {
    if (until == Cut::kNow || write.when > until) {
      break;
    }
    written[write.storage] = write.value;
  }
  const auto find = [&](const ValueId& id) -> Value {
    const auto same = [&](const NodePtr& node) { return node->sequence == id.node; };
    const auto node =
        std::partition_point(nodes.begin(), nodes.end(), [&](const NodePtr& n) { return n->sequence < id.node; });
    if (node != nodes.end() && same(*node)) {
      return {*node, id.index};
    }
    const auto leaf = std::find_if(leaves.begin(), leaves.end(), same);
    return leaf != leaves.end() ? Value{*leaf, 0} : Value{};
  };
  for_each_storage(device, [&](Storage& s) {
    Value value;
    if (s.value.node->sequence < until) {
      value = s.value == s.synced ? Value() : s.value;
    } else if (const auto write = written.find(s.id); write != written.end()) {
      value = find(write->second);
      if (!value && s.synced) {  // a leaf that is gone: it has none to go back to
        forgotten_.push_back(std::exchange(s.synced, {}));
      }
    } else if (s.initial.node < until) {
      value = find(s.initial);  // else it is `synced`
    }
    if (s.at_barrier) {
      forgotten_.push_back(std::move(s.at_barrier));
    }
    s.at_barrier = std::move(value);
  });
}

std::vector<std::vector<uint32_t>> Graph::resting() const {
  std::vector<std::vector<uint32_t>> found;
  std::unordered_map<const Pack*, size_t> known;
  for (uint32_t i = 0; i < leaves.size(); ++i) {
    auto* const pack = leaves[i]->source.defined() ? leaves[i]->source->pack() : nullptr;
    if (pack == nullptr || !pack->layout->stacked) {
      continue;
    }
    const auto [place, is_new] = known.emplace(pack, found.size());
    if (is_new) {
      found.emplace_back(pack->layout->shapes.size(), i);
    }
    found[place->second].at(leaves[i]->place) = i;
  }
  const auto lacks = [&](const std::vector<uint32_t>& slots) {
    return !leaves[slots[0]]->source->pack()->holds(leaves, slots);
  };
  found.erase(std::remove_if(found.begin(), found.end(), lacks), found.end());
  return found;
}

void Graph::clear() {
  while (!nodes.empty()) {
    nodes.pop_back();  // the latest first, so that none is the last to hold its inputs
  }
  forgotten_.clear();
  leaves.clear();
  outputs.clear();
  unused_fills_.clear();
  stacks.clear();
}

bool is_lost(const at::Tensor& tensor) {
  const RecorderLock lock;
  return is_xla(tensor) && impl_of(tensor)->alias.storage->value.node->error != nullptr;
}

bool has_pending(c10::DeviceIndex device, uint64_t until) {
  const RecorderLock lock;
  const auto since = last_cut[device];  // what is older runs, or waits for placeholders
  return since != node_sequence() && any_storage(device, [&](const Storage& s) {
           const auto& node = *s.value.node;
           return (!node.leaf() || node.unfilled()) && since <= node.sequence && node.sequence < until;
         });
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

std::optional<at::Tensor> copy_on_host(const at::Tensor& tensor) {
  at::Tensor values;
  {
    const RecorderLock lock;
    const auto* const found = find_values(*impl_of(tensor)->alias.current().node).values;
    values = found != nullptr ? *found : at::Tensor();
  }
  return values.defined() ? std::optional<at::Tensor>(values.clone()) : std::nullopt;
}

}  // namespace torch_xla
