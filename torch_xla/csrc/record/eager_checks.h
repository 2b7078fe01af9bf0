// What PyTorch's CPU kernels refuse although its Meta kernels accept it.
#pragma once
#include <ATen/core/ivalue.h>

#include <string>

namespace torch_xla {

struct OpInfo;

// Raises as the CPU kernel does where it refuses a call that PyTorch's Meta kernel accepts: by the operator's doubt, or
// because what is written overlaps what is read. Must not be called under the recorder's lock.
void raise_if_refused(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments);

// As above, for what depends on dtypes and shapes alone: asked once per signature. The CPU kernel runs where some
// tensor is empty, where tensors differ in dtype, or one has a dtype for which many kernels do not exist: boolean,
// integer, complex. It is not asked whether it knows 16-bit floating-point types, for which it lacks kernels that XLA
// has, nor about operators of a backward pass, and not believed of uint16, uint32 and uint64.
void raise_if_kernel_refuses(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments);

// Likewise for small floating-point tensors, whose shapes or dimensions a Meta kernel may not look at; `results` are
// what it gives.
void raise_if_kernel_refuses_shapes(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments,
                                    c10::ArrayRef<c10::IValue> results);

}  // namespace torch_xla
