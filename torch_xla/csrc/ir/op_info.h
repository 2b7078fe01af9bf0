// What the recorder knows of an operator, read once from its schema.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/SmallVector.h>

#include <atomic>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/hash.h"

namespace torch_xla {

// How a call is recorded, where not as a plain one.
enum class Form : uint8_t {
  Plain,
  AsStrided,         // its arguments tell the result's shape
  Chunks,            // of a tensor, as views
  AsStridedScatter,  // so do they, of what is written
  Index,             // has a data-dependent shape, for masks only
};

// How what was written to a view gets back to what it is a view of.
enum class Inverse : uint8_t {
  Memory,   // nothing is known of the operator but the strides of its result: the view is recorded as `as_strided`
  Shape,    // the dimensions were regrouped
  Scatter,  // by the operator `scatter`, with the arguments of the view
  Self,     // by the operator of the view, with its arguments
  Permute,  // of the dimensions, which is an argument of the view
  Complex,  // numbers and their two parts
  Bitcast,  // of the elements
};

// Whether a view may show some element more than once.
enum class SelfOverlap : uint8_t { Never, WhereLarger, Always };

enum class LazyBit : uint8_t { None, Conjugate, Negative };

// What becomes of a number that an operator is given. Every change of it costs a compile, or less where the program is
// not compiled yet.
enum class NumberPolicy : uint8_t {
  Input,               // of the program, whatever its value
  SpecializedTracked,  // a constant in each program, until it differs from that of a program that is alike in all else
  Specialized,         // likewise, and it has not differed in any program yet: nothing is done for it until then
  Constant,            // the operator cannot be lowered without its value
};

enum class ArgKind : uint8_t { Attr, Tensor, TensorList, OptTensorList, Number, NumberList, Generator };

struct HostOperator;  // of run/host_operators.h

struct OpInfo {
  explicit OpInfo(const c10::OperatorHandle& handle);

  c10::OperatorHandle op;
  std::string name;  // "aten.add.Tensor"
  Hash hash;
  uint64_t redefinitions = 0;  // how often an operator of this name was taken back before
  std::vector<ArgKind> kinds;
  std::vector<uint8_t> written;       // positions of the arguments the call writes
  std::vector<bool> is_out;           // per argument: an out= argument
  std::vector<bool> aliased;          // per argument: one the call writes, or returns a view of
  std::vector<int8_t> return_writes;  // per return: which entry of `written` it is, or -1 for a fresh tensor
  Form form = Form::Plain;
  bool view = false;  // the results alias the first argument
  Inverse inverse = Inverse::Memory;
  OpInfo* scatter = nullptr;
  SelfOverlap self_overlap = SelfOverlap::Never;
  LazyBit lazy_bit = LazyBit::None;
  bool inplace_view = false;         // changes the shape of its first argument (`t_`, `squeeze_`, …)
  bool seeded = false;               // draws random numbers
  int dropout = -1;                  // position of a `dropout_p`; where that is 0 nothing is drawn
  int element = -1;                  // position of an index of the first argument, or of its gradient,
  int element_rank = -1;             // and how many dimensions that has where the index tells an element of a vector
  const char* needs_host = nullptr;  // why it is computed between two programs
  bool has_tensor = false;
  bool has_indices = false;        // takes a list of optional tensors
  std::vector<int8_t> defaults;    // per argument: 0 or 1 where that is its default, such as alpha's, or -1
  OpInfo* functional = nullptr;    // the operator the node stands for, where this one writes
  int functional_extra = 0;        // optional arguments that operator has beyond this one's
  std::atomic<uint64_t> calls{0};  // how often it was recorded
  mutable std::atomic<const HostOperator*> on_host{nullptr};  // once it ran there

  // Of an argument of the operator that the node stands for.
  NumberPolicy policy(size_t argument) const {
    return argument < kinds.size() ? policies_[argument].load(std::memory_order_relaxed) : NumberPolicy::Constant;
  }
  // It has varied somewhere.
  void note_variation(size_t argument) {
    auto expected = NumberPolicy::Specialized;
    policies_[argument].compare_exchange_strong(expected, NumberPolicy::SpecializedTracked);
    learned = true;
  }
  // It cannot be lowered so: an input becomes a constant until it varies, and that a constant. False where it is one.
  bool specialize(size_t argument);
  std::atomic<bool> learned{false};  // a policy has changed: calls may have been recorded by another
  // The operator that nodes stand for.
  const OpInfo& recorded() const { return functional != nullptr ? *functional : *this; }

  // Whether all it gives are inputs it wrote in place, as `_fused_sgd_`.
  bool only_writes_inputs() const;

 private:
  void read_arguments();
  void read_returns();
  void choose_policies();
  void order_as_returned();
  std::unique_ptr<std::atomic<NumberPolicy>[]> policies_;
};

OpInfo& op_info(const c10::OperatorHandle& op);
OpInfo& op_info(const char* name, const char* overload);

// How often each operator was recorded, by its name without overload; forms that write count with the others.
std::unordered_map<std::string, uint64_t> op_counts();

// 0 and 1 written as integers stay constants of the program unless XLA_NO_SPECIAL_SCALARS=1.
bool is_special_number(const c10::IValue& number);
void set_special_numbers(bool on);
// Whether a number, or a list of them, is no input of a program, from the next cut on: none is, or it is one of 64 bits
// and devices have no such integers.
bool must_be_constant(const c10::IValue& number);
void set_all_numbers_constant(bool on);
// Whether devices have these types of 64 bits; numbers travel in those of 32 instead.
extern std::atomic<bool> wide_floats, wide_integers;

}  // namespace torch_xla
