// Recording: the one boxed kernel behind every operator on device xla that has no kernel of its own.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <string>
#include <vector>

namespace torch_xla {

void record(const c10::OperatorHandle& op, torch::jit::Stack* stack);

// Records these operators whole although PyTorch could decompose them by itself.
void record_whole(const std::vector<std::string>& names);

}  // namespace torch_xla
