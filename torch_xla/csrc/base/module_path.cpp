#include "base/module_path.h"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

#include "base/fork.h"

namespace torch_xla {

namespace {

constexpr size_t kForwards = 1 << 20;  // autograd nodes that are remembered

std::atomic<bool> used{false};
thread_local Scope current_scope = nullptr;

ForkSafe<std::mutex, LockOrder::Scopes> lock;
// By the sequence number of the autograd node that an operator made last.
std::unordered_map<uint64_t, Scope>& forwards() {
  static auto* const known = new std::unordered_map<uint64_t, Scope>();
  return *known;
}

}  // namespace

void set_scope(const std::string& path) {
  static auto* const paths = new std::unordered_map<std::string, Scope>();
  if (path.empty()) {
    current_scope = nullptr;
    return;
  }
  const std::lock_guard<std::mutex> guard(lock);
  auto& kept = (*paths)[path];
  if (kept == nullptr) {
    kept = new std::string(path);
  }
  current_scope = kept;
  used.store(true, std::memory_order_relaxed);
}

Scope recorded_scope() {
  if (!used.load(std::memory_order_relaxed)) {
    return nullptr;
  }
  const std::lock_guard<std::mutex> guard(lock);
  if (current_scope != nullptr) {
    if (forwards().size() >= kForwards) {
      forwards().clear();
    }
    forwards()[at::sequence_number::peek() - 1] = current_scope;
    return current_scope;
  }
  const auto backward = torch::autograd::get_current_node();
  if (backward == nullptr) {
    return nullptr;
  }
  const auto found = forwards().find(backward->sequence_nr());
  return found != forwards().end() ? found->second : nullptr;
}

}  // namespace torch_xla
