#include "record/masked_selection.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

#include "base/fork.h"
#include "base/python_hooks.h"
#include "device/capture.h"
#include "ir/host_cost.h"
#include "tensor/tensor_impl.h"

namespace torch_xla {

namespace {

using at::Tensor;
using c10::IValue;

// So many numbers of elements have programs, for each layout of the arguments.
constexpr size_t kNumbers = 4;
constexpr size_t kRemembered = 1024;

struct Selections {
  ForkSafe<std::mutex, LockOrder::Selected> mutex;
  std::unordered_map<uint64_t, int64_t> counts_by_leaf;                               // by the leaf's sequence number
  std::unordered_map<Hash, c10::SmallVector<int64_t, kNumbers>, HashHasher> numbers;  // that have programs
};

Selections& selection_cache() {
  static auto* const r = new Selections();
  return *r;
}

template <class Map>
typename Map::mapped_type& entry(Map& map, const typename Map::key_type& key) {
  if (map.size() >= kRemembered) {
    map.clear();
  }
  return map[key];
}

// How many elements of a mask are set, where reading that does not wait for the step; -1 otherwise. For a leaf it is
// read once.
int64_t read_number(const Tensor& mask, bool may_read) {
  if (!is_xla(mask)) {
    return at::count_nonzero(mask).item<int64_t>();
  }
  uint64_t leaf = 0;  // whose number is remembered
  {
    const RecorderLock lock;
    const auto value = impl_of(mask)->alias.current();
    if (!few_make(value, kHostMask.operators)) {
      return -1;
    }
    leaf = value.node->leaf() && knows_values(mask.device().index()) ? value.node->sequence : 0;
  }
  auto& cache = selection_cache();
  if (leaf != 0) {
    const std::lock_guard<std::mutex> lock(cache.mutex);
    if (const auto it = cache.counts_by_leaf.find(leaf); it != cache.counts_by_leaf.end()) {
      return it->second;
    }
  }
  if (!may_read) {
    return -1;
  }
  note_read("aten::_local_scalar_dense");
  const auto number = at::count_nonzero(fetch(mask)).item<int64_t>();
  if (leaf != 0) {
    const std::lock_guard<std::mutex> lock(cache.mutex);
    entry(cache.counts_by_leaf, leaf) = number;
  }
  return number;
}

// How many elements of a mask are set, or -1 where the host should run what is asked. `layout` is of the arguments.
int64_t count_selected(const Tensor& mask, const Hash& layout) {
  if (eager()) {
    return -1;
  }
  auto& cache = selection_cache();
  std::unique_lock<std::mutex> lock(cache.mutex);
  const bool full = entry(cache.numbers, layout).size() == kNumbers;
  lock.unlock();  // reading waits for the GIL, and for other threads perhaps
  const auto number = read_number(mask, !full);
  lock.lock();
  auto& numbers = entry(cache.numbers, layout);
  if (number < 0 || std::find(numbers.begin(), numbers.end(), number) != numbers.end()) {
    return number;
  }
  if (numbers.size() == kNumbers) {
    return -1;
  }
  numbers.push_back(number);
  return number;
}

void mix_sizes(Hash& hash, const Tensor& t) {
  for (const auto size : t.sizes()) {
    hash.mix(static_cast<uint64_t>(size));
  }
  hash.mix(static_cast<uint64_t>(t.dim()));
}

bool is_mask_of(const Tensor& t, const Tensor& self) {
  return t.scalar_type() == at::kBool && t.dim() > 0 && (t.device() == self.device() || t.is_cpu());
}

// As `index` does it: a mask stands for the indices of what it selects, one for each of its dimensions.
std::optional<Tensor> index_by_masks(const Tensor& self, const c10::List<std::optional<Tensor>>& arguments) {
  if (!is_xla(self)) {
    return {};
  }
  Hash layout;
  mix_sizes(layout, self);
  int64_t dim = 0;
  for (const std::optional<Tensor>& t : arguments) {
    const auto width = t && t->scalar_type() == at::kBool ? t->dim() : 1;
    if (t && t->defined()) {
      if (t->scalar_type() == at::kByte || dim + width > self.dim()) {
        return {};
      }
      if (t->scalar_type() == at::kBool) {
        if (!is_mask_of(*t, self) || t->sizes() != self.sizes().slice(dim, width)) {
          return {};
        }
        mix_sizes(layout, *t);
      }
      layout.mix(static_cast<uint64_t>(dim));
    }
    dim += width;
  }
  c10::List<std::optional<Tensor>> indices;
  for (const std::optional<Tensor>& t : arguments) {
    if (!t || !t->defined() || t->scalar_type() != at::kBool) {
      indices.push_back(t);
      continue;
    }
    const auto number = count_selected(*t, layout);
    if (number < 0) {
      return {};
    }
    for (auto& column : (is_xla(*t) ? at::nonzero_static(*t, number) : at::nonzero(*t)).unbind(1)) {
      indices.push_back(column);
    }
  }
  return at::index(self, indices);
}

std::optional<Tensor> select_by_mask(const Tensor& self, const Tensor& mask) {
  if (!is_xla(mask) || !is_mask_of(mask, self) || !at::are_expandable(self.sizes(), mask.sizes())) {
    return {};
  }
  const auto sizes = at::infer_size(self.sizes(), mask.sizes());
  return index_by_masks(self.expand(sizes), c10::List<std::optional<Tensor>>({mask.expand(sizes)}));
}

std::optional<Tensor> find_nonzero(const Tensor& self) {
  Hash layout;
  mix_sizes(layout, self);
  const auto number = self.dim() > 0 ? count_selected(self, layout) : -1;
  return number < 0 ? std::optional<Tensor>() : at::nonzero_static(self, number);
}

}  // namespace

bool record_selected(const OpInfo& info, torch::jit::Stack& stack) {
  static const auto& by_index = op_info("aten::index", "Tensor");
  static const auto& by_mask = op_info("aten::masked_select", "");
  static const auto& all = op_info("aten::nonzero", "");
  std::optional<Tensor> result;
  if (&info == &by_index) {
    result = index_by_masks(torch::jit::peek(stack, 0, 2).toTensor(),
                            torch::jit::peek(stack, 1, 2).to<c10::List<std::optional<Tensor>>>());
  } else if (&info == &by_mask) {
    result = select_by_mask(torch::jit::peek(stack, 0, 2).toTensor(), torch::jit::peek(stack, 1, 2).toTensor());
  } else if (&info == &all) {
    result = find_nonzero(torch::jit::peek(stack, 0, 1).toTensor());
  }
  if (!result) {
    return false;
  }
  torch::jit::drop(stack, info.kinds.size());
  stack.emplace_back(std::move(*result));
  return true;
}

}  // namespace torch_xla
