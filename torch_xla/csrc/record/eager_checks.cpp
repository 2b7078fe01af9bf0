#include "record/eager_checks.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "base/fork.h"
#include "base/python_hooks.h"
#include "base/tensors_of.h"
#include "ir/op_info.h"
#include "record/meta_cache.h"
#include "tensor/tensor_impl.h"

namespace torch_xla {

namespace {

using c10::IValue;
using Arguments = c10::ArrayRef<IValue>;

// Whether a call that writes `written` and reads `read` may be refused: where they overlap in part, and where they are
// the same elements but the operator does not go element by element.
bool may_overlap(const OpInfo& info, const at::Tensor& written, const at::Tensor& read) {
  const auto storage_of = [](const at::Tensor& t) {
    return t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  };
  if (storage_of(written) != storage_of(read)) {
    return false;
  }
  const auto status = at::get_overlap_status(written, read);
  return status == at::MemOverlapStatus::Partial ||
         (status == at::MemOverlapStatus::Full && !info.op.hasTag(at::Tag::pointwise));
}

bool overlaps(const OpInfo& info, Arguments arguments) {
  bool any = false;
  for (const auto position : info.written) {
    const auto& w = arguments[position];
    if (!w.isTensor() || !is_xla(w.toTensor())) {
      continue;
    }
    any = any || at::has_internal_overlap(w.toTensor()) == at::MemOverlap::Yes;
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (i != position) {
        for_each_tensor(arguments[i], [&](const at::Tensor& t) { any = any || may_overlap(info, w.toTensor(), t); });
      }
    }
  }
  return any;
}

// What an overlap depends on: where in which of the call's storages each tensor is.
Hash geometry(const OpInfo& info, Arguments arguments) {
  Hash key = info.hash;
  std::vector<const c10::StorageImpl*> storages;
  for (const auto& v : arguments) {
    for_each_tensor(v, [&](const at::Tensor& t) {
      const auto* const storage = is_xla(t) ? t.storage().unsafeGetStorageImpl() : nullptr;
      const auto it = std::find(storages.begin(), storages.end(), storage);
      key.mix(static_cast<uint64_t>(it - storages.begin()));
      if (it == storages.end()) {
        storages.push_back(storage);
      }
      key.mix(static_cast<uint64_t>(t.scalar_type()));
      key.mix(static_cast<uint64_t>(t.storage_offset()));
      for (int64_t d = 0; d < t.dim(); ++d) {
        key.mix(static_cast<uint64_t>(t.size(d)));
        key.mix(static_cast<uint64_t>(t.stride(d)));
      }
    });
  }
  return key;
}

// Whether the CPU accepted an overlap of this form before.
bool accepted_before(const Hash& key, bool remember) {
  constexpr size_t kCapacity = 1 << 14;
  static ForkSafe<std::mutex, LockOrder::Refusals> mutex;
  static auto* const accepted = new std::unordered_set<Hash, HashHasher>();
  const std::lock_guard<std::mutex> lock(mutex);
  if (remember) {
    if (accepted->size() >= kCapacity) {
      accepted->clear();
    }
    accepted->insert(key);
  }
  return accepted->count(key) != 0;
}

// Hands warnings on, and knows whether there were any.
struct Listener final : c10::WarningHandler {
  void process(const c10::Warning& warning) override {
    warned = true;
    next->process(warning);
  }
  c10::WarningHandler* const next = c10::WarningUtils::get_warning_handler();
  bool warned = false;
};

}  // namespace

void raise_if_overlapping(const OpInfo& info, Arguments arguments) {
  if (!info.written.empty() && overlaps(info, arguments)) {
    const auto key = geometry(info, arguments);
    if (!accepted_before(key, false)) {
      Listener listener;
      const c10::WarningUtils::WarningHandlerGuard guard(&listener);
      warn_and_raise_as_cpu(info, arguments);
      accepted_before(key, !listener.warned);
    }
  }
}

double raise_if_refused(const OpInfo& info, Arguments arguments, Arguments results) {
  size_t bytes = 0;
  for (const auto& v : results) {
    for_each_tensor(v, [&](const at::Tensor& t) { bytes += t.numel() * t.element_size(); });
  }
  return check_call(info.name, info.recorded().name, arguments, bytes,
                    [&](size_t limit, int fill) { raise_as_cpu(info, arguments, limit, static_cast<Fill>(fill)); });
}

namespace {

// The signature of a call with those of its numbers that are larger than others its operator takes; null without any.
std::optional<Hash> key_of_numbers(const OpInfo& info, Arguments arguments, const Hash& signature,
                                   double validated_magnitude) {
  std::optional<Hash> key;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& v = arguments[i];
    if (info.kinds[i] == ArgKind::Number && !v.isNone() && !v.isBool() &&
        !(v.isInt() && std::abs(static_cast<double>(v.toInt())) <= validated_magnitude) &&
        !(v.isDouble() && std::abs(v.toDouble()) <= validated_magnitude)) {
      key = key ? key : signature;
      key->mix(static_cast<uint64_t>(i));
      hash_attr(*key, v);
    }
  }
  return key;
}

std::unordered_set<Hash, HashHasher>& validated_numbers() {
  static auto* const validated = new std::unordered_set<Hash, HashHasher>();
  return *validated;
}

}  // namespace

bool are_validated_numbers(const OpInfo& info, Arguments arguments, const Hash& signature, double validated_magnitude) {
  const auto key = key_of_numbers(info, arguments, signature, validated_magnitude);
  return !key || validated_numbers().count(*key) != 0;
}

void note_validated_numbers(const OpInfo& info, Arguments arguments, const Hash& signature,
                            double validated_magnitude) {
  constexpr size_t kCapacity = 1 << 14;
  if (const auto key = key_of_numbers(info, arguments, signature, validated_magnitude)) {
    auto& validated = validated_numbers();
    if (validated.size() >= kCapacity) {
      validated.clear();
    }
    validated.insert(*key);
  }
}

}  // namespace torch_xla
