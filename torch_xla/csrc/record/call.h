// One call being recorded: which device it is on, and its arguments as the node will hold them.
#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>

#include "ir/node.h"
#include "ir/op_info.h"
#include "loops/call_trace.h"
#include "record/recompute.h"

namespace torch_xla {

// A number that is a constant of the program until it varies; which element of a vector is meant varies from the start,
// because loops read or write another in each step: a timestep of a schedule, a loss in a list of them.
inline Arg adaptive_arg(const OpInfo& op, size_t argument, int64_t rank, c10::IValue number) {
  return {static_cast<int>(argument) == op.element && rank == op.element_rank ? Arg::Kind::Number : Arg::Kind::Adaptive,
          0, std::move(number)};
}

class Call {
 public:
  Call(OpInfo& op, c10::IValue* first) : info(op), arguments(first) {}

  // Finds the device, and whether all tensors are on it.
  void find_device();
  bool foreign() const { return foreign_; }
  // Whether the call is not ours: what a FakeTensor wraps is a meta tensor that claims to be dispatched as on xla.
  bool fake() const { return fake_; }
  // A result where it is to be: an argument may ask for another device than that of the tensors.
  at::Tensor on_requested_device(at::Tensor result) const;
  // Brings stray host values to the device. Runs without the recorder's lock: it may copy.
  void adopt_foreign();
  // Index lists may hold host tensors, as on every device.
  void adopt_indices();
  // Fills `args`, `inputs`, `attrs`, `key`, `phase`, `sequence`, `reads` and `history`. Wants the lock.
  void collect();
  // Equal for calls of one operator, with equal constants, on and with tensors of the same shapes and dtypes.
  uint64_t signature(const MetaSet& metas) const;
  // Equal for calls of one operator whose results have the same dtypes and ranks.
  uint64_t kind(const MetaSet& metas) const { return info.hash.lo + metas.kind * 0x9fb21c651e98df25ULL; }

  c10::ArrayRef<c10::IValue> argument_list() const { return c10::ArrayRef<c10::IValue>(arguments, info.kinds.size()); }

  OpInfo& info;
  c10::IValue* const arguments;
  c10::DeviceIndex device = -1;
  Args args;
  Inputs inputs;
  CallSettings settings = 0;
  Hash attrs;             // of the constant arguments and the settings
  uint64_t sequence = 0;  // the node sequence before it
  StorageRange reads;     // of the storages it reads, those that were there before the trace's window
  bool history = false;   // some input has a backward pass
  Hash key;               // of the signature: operator, constants, layouts of the inputs
  Phase phase = Phase::Forward;
  std::optional<at::Generator> generator;

 private:
  void note(const at::Tensor& t, bool aliased);
  at::Tensor adopt(const at::Tensor& t, bool any_rank) const;
  void push(Arg arg);
  void add_input(const at::Tensor& t);
  void add_number(const c10::IValue& v, bool is_default = false);
  void add_adaptive(size_t i, const c10::IValue& v);
  void add_tensor(const at::Tensor& t);
  void add(size_t i, const c10::IValue& v);

  uint64_t first_storage_ = 0;
  bool foreign_ = false;  // some tensor is on another device
  bool fake_ = false;
  std::optional<c10::Device> other_;
  std::optional<c10::Device> requested_device_;  // an argument
};

}  // namespace torch_xla
