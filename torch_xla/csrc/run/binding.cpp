#include "run/binding.h"

#include <algorithm>

#include "base/python_hooks.h"
#include "tensor/lazy_clone.h"
#include "tensor/tensor_impl.h"

namespace torch_xla {

namespace {

// The leaf that has a tensor's value.
NodePtr leaf_of(const at::Tensor& tensor, size_t position) {
  TORCH_CHECK(is_xla(tensor), "[run] got input ", position, " on ", tensor.device(), ", expected it on xla");
  auto value = impl_of(tensor)->alias.current();
  resolve(value);
  const auto& node = *value.node;
  TORCH_CHECK(node.error == nullptr, node.error ? *node.error : std::string());
  TORCH_CHECK(node.leaf() && !node.unfilled(), "[run] got input ", position,
              " with a value that is pending; compute it first, as torch_xla.sync() does");
  return value.node;
}

Storage& storage_of(const at::Tensor& tensor) { return *impl_of(tensor)->alias.storage; }

}  // namespace

Binding::Binding(std::shared_ptr<Program> program, const std::vector<at::Tensor>& inputs, Vector<NumberSlot> values,
                 std::vector<at::Tensor> results)
    : program_(std::move(program)), results_(std::move(results)) {
  device = program_->device;
  numbers = std::move(values);
  TORCH_CHECK(inputs.size() == program_->inputs.size() && results_.size() == program_->outputs.size() &&
                  numbers.size() == program_->numbers.size(),
              "[run] got ", inputs.size(), " inputs, ", numbers.size(), " numbers and ", results_.size(),
              " results, expected ", program_->inputs.size(), ", ", program_->numbers.size(), " and ",
              program_->outputs.size());
  TORCH_CHECK(program_->sharing->holds(numbers),
              "[run] got numbers that differ, expected them equal as those were "
              "that the program was compiled for; record the call again");
  std::vector<size_t> copied;
  {
    const RecorderLock lock;
    check_results();
    for (size_t i = 0; i < inputs.size(); ++i) {
      leaves.push_back(leaf_of(inputs[i], i));
      const auto& leaf = *leaves[i];
      TORCH_CHECK((program_->inputs[i] == Program::Type{leaf.meta(0).value, leaf.placement}) &&
                      inputs[i].device().index() == device,
                  "[run] got input ", i, " of another shape, dtype or place than the program was compiled for");
    }
    copied = written_for_others();
  }
  std::vector<PyObject*> buffers;
  for (const auto i : copied) {
    fetch_clones(clones_to_fetch({leaves[i]}, {false}));
    fetch_buffer(leaves[i]);
    buffers.push_back(leaves[i]->buffer);
  }
  const auto copies = buffers.empty() ? buffers : copy(buffers);
  Vector<NodePtr> old;  // destroyed after the lock is gone
  const RecorderLock lock;
  for (size_t k = 0; k < copied.size(); ++k) {
    auto& leaf = leaves[copied[k]];
    old.push_back(std::exchange(leaf, make_leaf({leaf->outs, 0}, copies[k]).node));
    leaf->placement = old.back()->placement;
  }
}

void Binding::check_results() const {
  for (size_t i = 0; i < results_.size(); ++i) {
    const auto& tensor = results_[i];
    TORCH_CHECK(is_xla(tensor) && tensor.device().index() == device, "[run] got result ", i, " on ", tensor.device(),
                ", expected it on xla:", static_cast<int>(device));
    const auto& alias = impl_of(tensor)->alias;
    TORCH_CHECK(!alias.path.defined() && program_->outputs[i].value == alias.meta->value, "[run] got result ", i,
                " that is a view, or of another shape or dtype than the program gives");
    const auto same = [&](const at::Tensor& other) { return &storage_of(other) == alias.storage.get(); };
    TORCH_CHECK(std::none_of(results_.begin(), results_.begin() + static_cast<std::ptrdiff_t>(i), same),
                "[run] got result ", i, " twice, expected a tensor for each");
  }
}

// Inputs that the program writes over although more is left of them than the value that a result replaces.
std::vector<size_t> Binding::written_for_others() const {
  std::vector<size_t> found;
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (!program_->packing.donated[i]) {
      continue;
    }
    const auto& leaf = leaves[i];
    const auto successor = program_->successors[i];
    size_t ours = 1;
    bool replaced = false;
    if (successor >= 0) {
      const auto& storage = storage_of(results_[successor]);
      replaced = storage.value.node == leaf;
      ours += replaced ? 1 : 0;
      ours += storage.synced && storage.synced.node == leaf ? 1 : 0;
    }
    if (!replaced || leaf->shared || leaf.use_count() != ours + waiting_clones(*leaf)) {
      found.push_back(i);
    }
  }
  return found;
}

void Binding::attach(Vector<Result> results) {
  Vector<Value> old;  // destroyed after the lock is gone
  {
    const RecorderLock lock;
    for (size_t i = 0; i < results_.size(); ++i) {
      auto& storage = storage_of(results_[i]);
      auto leaf = make_leaf(storage.meta, results[i].buffer);
      leaf.node->source = std::move(results[i].source);
      leaf.node->place = results[i].place;
      leaf.node->placement = storage.placement = results[i].placement;
      for (auto* held : {&storage.value, &storage.synced, &storage.origin}) {
        old.push_back(std::move(*held));
      }
      storage.origin = {};
      storage.value = storage.synced = std::move(leaf);
      ++storage.generation;
    }
  }
  for (const auto& tensor : results_) {
    if (!tensor.is_inference()) {
      tensor.unsafeGetTensorImpl()->bump_version();
    }
  }
}

}  // namespace torch_xla
