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
std::unordered_map<uint64_t, Scope>& forward_scopes() {
  static auto* const scopes = new std::unordered_map<uint64_t, Scope>();
  return *scopes;
}

}  // namespace

Scope scope_of(const std::string& path) {
  static auto* const paths = new std::unordered_map<std::string, Scope>();
  if (path.empty()) {
    return nullptr;
  }
  const std::lock_guard<std::mutex> guard(lock);
  auto& scope = (*paths)[path];
  if (scope == nullptr) {
    scope = new std::string(path);
  }
  return scope;
}

void set_scope(const std::string& path) {
  current_scope = scope_of(path);
  if (current_scope != nullptr) {
    used.store(true, std::memory_order_relaxed);
  }
}

Scope recorded_scope() {
  if (!used.load(std::memory_order_relaxed)) {
    return nullptr;
  }
  const std::lock_guard<std::mutex> guard(lock);
  if (current_scope != nullptr) {
    if (forward_scopes().size() >= kForwards) {
      forward_scopes().clear();
    }
    forward_scopes()[at::sequence_number::peek() - 1] = current_scope;
    return current_scope;
  }
  const auto backward = torch::autograd::get_current_node();
  if (backward == nullptr) {
    return nullptr;
  }
  const auto it = forward_scopes().find(backward->sequence_nr());
  return it != forward_scopes().end() ? it->second : nullptr;
}

}  // namespace torch_xla
