// What PyTorch's CPU kernels refuse although its Meta kernels accept it; ops/checks.py has the rules.
#pragma once
#include <ATen/core/ivalue.h>

#include "base/hash.h"

namespace torch_xla {

struct OpInfo;

// Raises as the CPU kernel does where what is written overlaps what is read. Must not be called under the recorder's
// lock.
void raise_if_overlapping(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments);

// Raises what the CPU kernel says of a call that it refuses because of dtypes, shapes, or numbers; `results` are what
// the Meta kernel gives. Asked once per signature, and again for numbers that are larger than what is returned: where
// that is infinite, no number is refused. Must not be called under the recorder's lock.
double raise_if_refused(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, c10::ArrayRef<c10::IValue> results);

// Whether the numbers of a call were accepted before, for its signature. Wants the recorder's lock, as the next does.
bool are_validated_numbers(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, const Hash& signature,
                           double validated_magnitude);
void note_validated_numbers(const OpInfo& info, c10::ArrayRef<c10::IValue> arguments, const Hash& signature,
                            double validated_magnitude);

}  // namespace torch_xla
