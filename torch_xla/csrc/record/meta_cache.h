// Result shapes by signature: PyTorch's Meta kernels run once per operator, constants and input layouts.
#pragma once
#include <ATen/core/stack.h>

#include "ir/node.h"
#include "ir/op_info.h"

namespace torch_xla {

// The metas under `key`, or null. Wants the recorder's lock.
const MetaSetPtr* find_metas(const Hash& key);

// Runs the operator's Meta kernel on `stack` with every tensor replaced by its meta twin; errors are the ones PyTorch
// raises. Fresh results come first, then the written arguments. Remembers them under `key`. Must not be called under
// the recorder's lock.
MetaSetPtr infer_metas(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, const Hash& key);

// What tensors hold that stand for others. Zeros are indices too; the various numbers make no matrix singular.
enum class Fill : uint8_t { Zeros, Ones, Various };

// Runs the CPU kernel on tensors of these shapes, because its message is the one users know and Meta kernels word many
// differently. Returns if it does not raise, or a tensor would be larger: one that is mostly accepted takes its time.
constexpr size_t kSmall = size_t{1} << 24;
constexpr size_t kAnySize = size_t{1} << 40;
void raise_as_cpu(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, size_t bytes = kSmall,
                  Fill fill = Fill::Zeros);
// The same, and its warnings.
void warn_and_raise_as_cpu(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, size_t bytes = kSmall,
                           Fill fill = Fill::Zeros);

// After `infer_metas` failed: the same, and the metas of what the CPU kernel returned if it accepts the call; null
// where it was not asked.
MetaSetPtr infer_metas_as_cpu(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, const Hash& key);

uint64_t shape_cache_misses();

}  // namespace torch_xla
