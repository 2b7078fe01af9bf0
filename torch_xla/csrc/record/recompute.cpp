#include "record/recompute.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <algorithm>
#include <unordered_map>

#include "base/python_hooks.h"
#include "device/capture.h"
#include "ir/op_info.h"

namespace torch_xla {

namespace {

using WeakNode = c10::weak_intrusive_ptr<Node>;

struct Key {
  const Node* node;
  uint32_t index;
  bool operator==(const Key& other) const { return node == other.node && index == other.index; }
};
struct KeyHash {
  size_t operator()(const Key& k) const { return std::hash<const void*>()(k.node) * 31 + k.index; }
};

// What a thread knows of the backward pass it runs.
struct Backward {
  int task = -1;                 // the engine's number for the backward pass of the latest call
  int newest = -1;               // the highest there was
  bool differentiable = false;   // the pass is recorded for a second one (create_graph)
  bool inside = false;           // a recomputation is going on
  const void* node = nullptr;    // the autograd node that asked for it
  uint64_t start = 0;            // the sequence number at which it began
  std::vector<WeakNode> recent;  // the latest calls outside of one: most likely the gradient it is for
  c10::DeviceIndex device = -1;
  std::unordered_map<Key, WeakNode, KeyHash> barriers;
};
thread_local Backward backward;

constexpr size_t kRecent = 4;

// Whether a backward pass is going on.
bool in_backward() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task < 0 || eager()) {
    return false;
  }
  if (task != backward.task) {
    backward.task = task;
    // A pass that is recorded has gradients on all the time, and so at its first call. One that goes on after a pass
    // within it is not at its first call.
    backward.differentiable =
        task > backward.newest && at::GradMode::is_enabled() && torch::autograd::get_current_graph_task_keep_graph();
    backward.newest = std::max(backward.newest, task);
  }
  return true;
}

NodePtr latest(c10::DeviceIndex device) {
  if (backward.device == device) {
    for (auto weak = backward.recent.rbegin(); weak != backward.recent.rend(); ++weak) {
      auto node = weak->lock();
      if (node && node->replacements == nullptr && node->outs->metas.front().defined() &&
          node->sequence >= end_of_capture(device)) {
        return node;
      }
    }
  }
  return {};
}

NodePtr make_barrier(const Value& value, c10::DeviceIndex device) {
  static auto& op = op_info("xla::optimization_barrier", "");
  Inputs inputs{value};
  auto outs = c10::make_intrusive<MetaSet>();
  outs->metas.push_back(value.node->meta(value.index));
  if (auto node = latest(device)) {
    outs->metas.push_back(node->meta(0));
    inputs.push_back({std::move(node), 0});
  }
  const auto count = static_cast<uint32_t>(inputs.size());
  outs->returns.push_back(static_cast<int32_t>(count));
  outs->rehash();
  return make_node(op, {{Arg::Kind::Inputs, count, {}}}, std::move(inputs), std::move(outs));
}

std::vector<at::Tensor> copies(at::TensorList tensors) {
  std::vector<at::Tensor> results;
  results.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    results.push_back(tensor.clone());
  }
  return results;
}

}  // namespace

Phase current_phase() {
  return !in_backward()                                           ? Phase::Forward
         : at::GradMode::is_enabled() && !backward.differentiable ? Phase::Recomputation
                                                                  : Phase::Backward;
}

Value behind_barrier(const Value& value, c10::DeviceIndex device) {
  if (!backward.inside) {
    backward.inside = true;
    backward.node = torch::autograd::get_current_node().get();
    backward.start = node_sequence();
    backward.barriers.clear();
  }
  if (value.node->sequence >= backward.start) {
    return value;
  }
  auto& weak = backward.barriers.try_emplace({value.node.get(), value.index}, WeakNode(NodePtr())).first->second;
  auto barrier = weak.lock();
  // A barrier that was computed has let its input go, and another node may have taken its place.
  if (!barrier || barrier->inputs.empty() || !(barrier->inputs.front() == value)) {
    barrier = make_barrier(value, device);
    weak = WeakNode(barrier);
  }
  return {std::move(barrier), 0};
}

Value gradient_to_wait_for(c10::DeviceIndex device) { return {latest(device), 0}; }

void note_backward(const NodePtr& node, c10::DeviceIndex device) {
  // What it computes without gradients belongs to a recomputation too.
  if (backward.inside && backward.node == torch::autograd::get_current_node().get()) {
    return;
  }
  backward.inside = false;
  if (backward.device != device) {
    backward.recent.clear();
    backward.device = device;
  }
  if (backward.recent.size() == kRecent) {
    backward.recent.erase(backward.recent.begin());
  }
  backward.recent.emplace_back(node);
}

TORCH_LIBRARY_FRAGMENT(xla, m) { m.def("optimization_barrier(Tensor[] tensors) -> Tensor[]"); }
TORCH_LIBRARY_IMPL(xla, CPU, m) { m.impl("optimization_barrier", TORCH_FN(copies)); }
TORCH_LIBRARY_IMPL(xla, Meta, m) { m.impl("optimization_barrier", TORCH_FN(copies)); }

}  // namespace torch_xla
