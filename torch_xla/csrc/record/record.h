// Recording: the one boxed kernel behind every operator on device xla that has no kernel of its own.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace torch_xla {

struct OpInfo;
using Tensors = c10::SmallVector<at::Tensor, 2>;

void record(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// The two that follow want a FrameScope.
void record_any(OpInfo& info, torch::jit::Stack* stack);
// Records a plain operator or view where a call of this signature was recorded before, and gives the fresh tensors.
// Gives none for any other call, and has done nothing then. Leaves the arguments as they are.
std::optional<Tensors> record_cached(OpInfo& info, c10::IValue* arguments);

// Records these operators whole although PyTorch could decompose them by itself.
void record_undecomposed(const std::vector<std::string>& names);

// Computes these operators on the host, between two programs.
void keep_on_host(const std::vector<std::string>& names);

// Has these operators, when they are called with check_errors, wait for what their last result says, and raise it under
// the given names.
void check_errors(const std::unordered_map<std::string, std::string>& names);

// Refuses these operators, whose results hold addresses of the host.
void refuse_packing(const std::vector<std::string>& names);

}  // namespace torch_xla
