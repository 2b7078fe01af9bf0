// The graph: a Node is one recorded operator call (or a leaf that holds a device buffer), a Value is one of its
// results.
#pragma once
#include <ATen/core/ivalue.h>
#include <c10/util/SmallVector.h>
#include <c10/util/accumulate.h>
#include <c10/util/intrusive_ptr.h>

#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "base/call_settings.h"
#include "base/hash.h"
#include "base/module_path.h"
#include "base/pool.h"
#include "base/user_line.h"

typedef struct _object PyObject;

namespace torch_xla {

struct OpInfo;
struct Node;

// Shape, strides and dtype of one result, as PyTorch's Meta kernels give them.
struct Meta {
  c10::SmallVector<int64_t, 5> sizes;
  c10::SmallVector<int64_t, 5> strides;
  int64_t offset = 0;
  at::ScalarType dtype = at::ScalarType::Undefined;
  int64_t bytes = 0;      // of its elements
  bool row_major = true;  // contiguous
  Hash layout;            // sizes, strides, dtype: what later shapes depend on
  Hash value;             // sizes, dtype: what the program depends on

  bool defined() const { return dtype != at::ScalarType::Undefined; }
  int64_t numel() const { return c10::multiply_integers(sizes); }
  // Raises a TypeError where XLA does not have the dtype: no value of such a type is ever promised.
  void rehash();
};

// The metas of all results of one call; shared by every call with the same signature.
struct MetaSet final : c10::intrusive_ptr_target {
  std::vector<Meta> metas;
  // Per return of the schema: a tensor, a number (which has an undefined meta), or a list of that length.
  static constexpr int32_t kTensor = -1;
  static constexpr int32_t kNumber = -2;
  c10::SmallVector<int32_t, 4> returns;
  std::vector<int64_t> numbers;
  // Numbers that are no larger change nothing about whether the call is refused; see record/eager_checks.h.
  double validated_magnitude = std::numeric_limits<double>::infinity();
  Hash value;
  uint64_t kind = 0;                                 // of the dtypes and ranks alone
  std::vector<c10::intrusive_ptr<MetaSet>> singles;  // of each result by itself, once that was asked for

  void rehash();
};
using MetaSetPtr = c10::intrusive_ptr<MetaSet>;

struct MetaRef {
  MetaSetPtr set;
  uint32_t index = 0;
  const Meta& operator*() const { return set->metas[index]; }
  const Meta* operator->() const { return &set->metas[index]; }
};
MetaRef make_meta(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset, at::ScalarType dtype);
MetaRef contiguous_meta(c10::IntArrayRef sizes, at::ScalarType dtype);

// Whether XLA has the type; `ops/dtypes.py` tells which it is.
bool has_xla_type(at::ScalarType dtype);

// The placement of a buffer: its device alone, or a copy on each device of the mesh (replicated). Other numbers stand
// for shardings, of which Python has the table.
constexpr uint32_t kReplicated = 0;
constexpr uint32_t kUnspecified = 1;           // the compiler chooses
constexpr uint32_t kExplicitlyReplicated = 2;  // replicated by choice: of a program, or of the user
inline bool is_replicated(uint32_t placement) { return placement == kReplicated || placement == kExplicitlyReplicated; }

struct Value {
  c10::intrusive_ptr<Node> node;
  uint32_t index = 0;
  explicit operator bool() const { return node.defined(); }
  bool operator==(const Value& other) const { return node == other.node && index == other.index; }
};

// One argument of a recorded call.
struct Arg {
  enum class Kind : uint8_t {
    Attr,       // `value` as passed; None for an undefined tensor
    Input,      // the next input
    Inputs,     // the next `count` inputs, a list
    OptInputs,  // a list of `count`, of which the bits set in `value` are inputs and the rest None
    Number,     // `value` is an input of the program, not a constant
    Adaptive,   // so is this, or each element of it, where it varies
    Integer,    // so is this, where it varies or never was special
  };
  Kind kind = Kind::Attr;
  uint32_t count = 0;
  c10::IValue value;
};
inline Arg input_arg() { return {Arg::Kind::Input, 0, {}}; }
inline bool is_number(const Arg& arg) { return arg.kind >= Arg::Kind::Number; }
inline Arg attr(c10::IValue value) { return {Arg::Kind::Attr, 0, std::move(value)}; }
using Args = c10::SmallVector<Arg, 5>;
using Inputs = c10::SmallVector<Value, 3>;

// Where a leaf's values are; borrowed.
struct Location {
  PyObject* buffer = nullptr;
  int64_t start = -1;                  // index of their first element in it; -1 where it holds nothing else
  const at::Tensor* values = nullptr;  // still on the host
};

// What a leaf without a buffer of its own is; see source.h.
struct Source : c10::intrusive_ptr_target {
  enum class Kind : uint8_t { Pack, HostValues, NumberFill, Clone, Placeholder, Lost };
  explicit Source(Kind k) : kind(k) {}
  // Gives one of its leaves a buffer of its own, or says why it has no value. Wants the GIL, not the recorder's lock.
  virtual void fetch(const c10::intrusive_ptr<Node>& leaf) = 0;
  // Where a leaf's values are without one.
  virtual Location find(const Node& /*leaf*/) const { return {}; }
  const Kind kind;
};

// A value that is gone, or that a captured graph computes at its first replay.
struct Lost final : Source {
  explicit Lost(std::string w, bool u = false) : Source(Kind::Lost), why(std::move(w)), uncomputed(u) {}
  void fetch(const c10::intrusive_ptr<Node>& leaf) override;
  const std::string why;
  const bool uncomputed;
};

// A step makes, cuts and frees hundreds of them, so what is read most comes first: the first line of the processor's
// cache for an input, two more for a node that is computed.
struct alignas(64) Node final : c10::intrusive_ptr_target, Pooled<Node> {
  OpInfo* op = nullptr;  // null for a leaf
  uint64_t sequence = 0;

  // The leaves that have the results that are computed: a call never changes. Of a copy the leaf whose values it had.
  std::unique_ptr<c10::SmallVector<Value, 1>> replacements;

  // Scratch of one walk, valid for its `epoch` under the recorder's lock.
  uint64_t epoch = 0;
  uint32_t slot = 0;
  uint32_t references = 0;
  bool marked = false;

  uint32_t cuts = 0;  // references of cut graphs, which keep no buffer: one that has begun runs alone
  bool seeded = false;
  bool numbered = false;  // some argument is an input of the program, or may become one
  bool fill = false;      // a call that gives one number everywhere
  bool donor = false;     // a buffer donor: the next program may write over the buffer, though a tensor still has it
  bool donated = false;   // a program is about to write over the buffer
  CallSettings settings = 0;

  Hash attrs;  // of the constant arguments and the settings
  MetaSetPtr outs;
  // A leaf has a device buffer (a JAX array), or a source.
  PyObject* buffer = nullptr;
  c10::intrusive_ptr<Source> source;
  uint32_t source_index = 0;         // which of the source's they are
  uint32_t placement = kReplicated;  // where the buffer is
  Inputs inputs;
  std::unique_ptr<std::vector<c10::weak_intrusive_ptr<Node>>> clones;  // may have no buffers but this one

  Args args;
  int64_t seed[2] = {0, 0};  // for operators that draw random numbers
  Scope scope = nullptr;     // the module it belongs to, if that is kept
  Frame frame = nullptr;     // the user's line that recorded it, or copied a leaf's value here

  Node();
  explicit Node(uint64_t sequence) : sequence(sequence) {}
  ~Node() override { release(); }
  // A node that is gone may wait for its weak references, but what it holds must not.
  void release_resources() override { release(); }
  bool leaf() const { return op == nullptr; }
  // What a leaf is that has no buffer of its own.
  bool is(Source::Kind kind) const { return buffer == nullptr && source.defined() && source->kind == kind; }
  bool has_value() const { return !is(Source::Kind::Lost) && !is(Source::Kind::Placeholder); }
  const Meta& meta(uint32_t index) const { return outs->metas[index]; }
  // Makes the leaf that has a result from now on. With the last one the node lets its inputs go, to `garbage`.
  Node& replace(uint32_t index, Vector<Value>& garbage);

 private:
  void release();
};
using NodePtr = c10::intrusive_ptr<Node>;

// Follows a result to the leaf that replaced it, if any.
void resolve(Value& value);
// Whether a value is made of leaves by few operators that draw nothing: as a tree it has so many nodes at most.
bool few_make(const Value& value, size_t most);

// What the hash of a node's arguments starts from.
Hash begin_attrs(const OpInfo& op, CallSettings settings);
// Of operators that read no settings, such as views.
NodePtr make_node(OpInfo& op, Args&& args, Inputs&& inputs, MetaSetPtr outs);
// As above, where the caller has hashed the arguments already (see `hash_arg`).
NodePtr make_node(OpInfo& op, Args&& args, Inputs&& inputs, MetaSetPtr outs, CallSettings settings, const Hash& attrs);
void hash_arg(Hash& hash, const Arg& arg);
// Whether a value is a whole or floating-point number, or a list of them.
inline bool is_numeric(const c10::IValue& v) { return v.isInt() || v.isDouble() || v.isIntList() || v.isDoubleList(); }
// The sequence number the next node will get.
uint64_t node_sequence();
// The meta of one result by itself. Wants the recorder's lock if there are others; so do the next three.
MetaSetPtr single(const MetaRef& meta);
Value make_leaf(const MetaRef& meta, PyObject* stolen_buffer);
// A leaf without a value, and why it has none.
Value make_lost(const MetaRef& meta, const std::string& why, bool uncomputed = false);
// The value of a tensor made from nothing: `number` everywhere.
Value make_fill(const MetaRef& meta, const c10::IValue& number);

// What memory holds that nobody has written: zeros, or what torch.utils.deterministic.fill_uninitialized_memory wants.
c10::IValue unwritten(c10::ScalarType dtype);

void hash_attr(Hash& hash, const c10::IValue& value);

// Releases a Python object from any thread: at once where the GIL is held, else when the main thread next runs Python
// code, or at the next `drain_released`. PyTorch drops tensors without the GIL, and their memory is wanted back.
void release_object(PyObject* object);
void drain_released();

// Marks the calling thread as holding a recorder lock: Python objects are then released later, because a thread that
// waits for the GIL under a lock can wait for a thread that waits for the lock under the GIL.
struct NoPython {
  NoPython();
  ~NoPython();
};

}  // namespace torch_xla
