#include "ir/node.h"

#include <ATen/Context.h>
#include <ATen/Dispatch_v2.h>
#include <Python.h>
#include <c10/core/Contiguity.h>
#include <c10/util/strides.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <mutex>

#include "base/fork.h"
#include "base/user_line.h"
#include "ir/op_info.h"

namespace torch_xla {

namespace {

std::atomic<uint64_t> next_sequence{1};
thread_local int no_python = 0;

struct Released {
  ForkSafe<std::mutex, LockOrder::Released> mutex;
  std::vector<PyObject*> objects;
  bool asked = false;  // the interpreter will drain it
};
Released& released() {
  static auto* const queue = new Released();  // outlives the interpreter on purpose
  return *queue;
}

}  // namespace

bool has_xla_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::ScalarType::Bool:
    case at::ScalarType::Byte:
    case at::ScalarType::Char:
    case at::ScalarType::Short:
    case at::ScalarType::Int:
    case at::ScalarType::Long:
    case at::ScalarType::UInt16:
    case at::ScalarType::UInt32:
    case at::ScalarType::UInt64:
    case at::ScalarType::Half:
    case at::ScalarType::BFloat16:
    case at::ScalarType::Float:
    case at::ScalarType::Double:
    case at::ScalarType::ComplexFloat:
    case at::ScalarType::ComplexDouble:
    case at::ScalarType::Float8_e4m3fn:
    case at::ScalarType::Float8_e4m3fnuz:
    case at::ScalarType::Float8_e5m2:
    case at::ScalarType::Float8_e5m2fnuz:
      return true;
    default:
      return false;
  }
}

void Meta::rehash() {
  TORCH_CHECK_TYPE(!defined() || has_xla_type(dtype), "[dtype] got torch.", c10::getDtypeNames(dtype).first,
                   ", which has no XLA type, expected one that has; convert the tensor first, e.g. .to(torch.float32)");
  row_major = c10::_compute_contiguous<int64_t>(sizes, strides, numel());
  bytes = defined() ? numel() * static_cast<int64_t>(c10::elementSize(dtype)) : 0;
  value = Hash();
  value.mix(static_cast<uint64_t>(dtype));
  for (const auto s : sizes) {
    value.mix(static_cast<uint64_t>(s));
  }
  layout = value;
  for (const auto s : strides) {
    layout.mix(static_cast<uint64_t>(s));
  }
}

void MetaSet::rehash() {
  value = Hash();
  Hash kinds;
  for (auto& m : metas) {
    m.rehash();
    value.mix(m.value);
    kinds.mix(static_cast<uint64_t>(m.dtype) << 32 | m.sizes.size());
  }
  kind = kinds.lo;
}

MetaRef make_meta(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset, at::ScalarType dtype) {
  auto set = c10::make_intrusive<MetaSet>();
  Meta m;
  m.sizes.assign(sizes.begin(), sizes.end());
  m.strides.assign(strides.begin(), strides.end());
  m.offset = offset;
  m.dtype = dtype;
  set->metas.push_back(std::move(m));
  set->returns.push_back(MetaSet::kTensor);
  set->rehash();
  return {std::move(set), 0};
}

MetaRef contiguous_meta(c10::IntArrayRef sizes, at::ScalarType dtype) {
  return make_meta(sizes, c10::contiguous_strides(sizes), 0, dtype);
}

Node::Node() : sequence(next_sequence.fetch_add(1, std::memory_order_relaxed)) {}

void Node::release() {
  release_object(std::exchange(buffer, nullptr));
  source.reset();
  replacements.reset();
  // A chain of a million nodes must not be released by a million nested destructors: take the inputs of every node
  // that dies here before it does. Mostly none does.
  const auto dies = [](const Value& v) { return v.node.defined() && v.node.use_count() == 1; };
  if (std::none_of(inputs.begin(), inputs.end(), dies)) {
    inputs.clear();
    return;
  }
  Vector<Value> dying(std::make_move_iterator(inputs.begin()), std::make_move_iterator(inputs.end()));
  inputs.clear();
  while (!dying.empty()) {
    const Value value = std::move(dying.back());
    dying.pop_back();
    if (dies(value)) {
      auto& next = value.node->inputs;
      dying.insert(dying.end(), std::make_move_iterator(next.begin()), std::make_move_iterator(next.end()));
      next.clear();
    }
  }
}

Node& Node::replace(uint32_t index, Vector<Value>& garbage) {
  const auto count = outs->metas.size();
  auto leaf = count == 1 ? c10::make_intrusive<Node>(sequence) : c10::make_intrusive<Node>();
  leaf->outs = single({outs, index});
  leaf->frame = frame;
  if (replacements == nullptr) {
    replacements = std::make_unique<c10::SmallVector<Value, 1>>(count);
  }
  auto& replacement = (*replacements)[index];
  if (replacement) {
    garbage.push_back(std::move(replacement));
  }
  replacement = {leaf, 0};
  if (std::all_of(replacements->begin(), replacements->end(), [](const Value& v) { return static_cast<bool>(v); })) {
    garbage.insert(garbage.end(), std::make_move_iterator(inputs.begin()), std::make_move_iterator(inputs.end()));
    inputs.clear();
  }
  return *leaf;
}

void resolve(Value& value) {
  const auto& replacements = value.node->replacements;
  if (replacements != nullptr && (*replacements)[value.index]) {
    value = Value((*replacements)[value.index]);
  }
}

bool few_make(const Value& value, size_t most) {
  std::vector<Value> values{value};
  for (size_t i = 0; i < values.size(); ++i) {
    resolve(values[i]);
    const auto& node = *values[i].node;
    if (!node.leaf() && (node.seeded || values.size() > most)) {
      return false;
    }
    values.insert(values.end(), node.inputs.begin(), node.inputs.end());
  }
  return true;
}

void hash_arg(Hash& hash, const Arg& arg) {
  // What a number becomes is told by the policy, which may change before the cut.
  const auto kind = is_number(arg) ? Arg::Kind::Number : arg.kind;
  hash.mix(static_cast<uint64_t>(kind) << 32 | arg.count);
  if (arg.kind == Arg::Kind::Attr || arg.kind == Arg::Kind::OptInputs) {
    hash_attr(hash, arg.value);
  } else if (is_number(arg)) {
    const bool list = arg.value.isList();
    hash.mix(static_cast<uint64_t>(list ? arg.value.toListRef().size() : 0) << 8 |
             static_cast<uint64_t>(arg.value.isInt()       ? 1
                                   : arg.value.isDouble()  ? 2
                                   : !list                 ? 3
                                   : arg.value.isIntList() ? 4
                                                           : 5));
  }
}

Hash begin_attrs(const OpInfo& op, CallSettings settings) {
  Hash attrs;
  if (op.redefinitions != 0) {
    attrs.mix(op.redefinitions);
  }
  if (settings != 0) {
    attrs.mix(uint64_t{settings} << 32);
  }
  return attrs;
}

NodePtr make_node(OpInfo& op, Args&& args, Inputs&& inputs, MetaSetPtr outs) {
  auto attrs = begin_attrs(op, 0);
  for (const auto& arg : args) {
    hash_arg(attrs, arg);
  }
  return make_node(op, std::move(args), std::move(inputs), std::move(outs), 0, attrs);
}

NodePtr make_node(OpInfo& op, Args&& args, Inputs&& inputs, MetaSetPtr outs, CallSettings settings, const Hash& attrs) {
  auto node = c10::make_intrusive<Node>();
  node->op = &op;
  node->numbered = std::any_of(args.begin(), args.end(), [](const Arg& a) { return is_number(a); });
  node->args = std::move(args);
  node->inputs = std::move(inputs);
  node->outs = std::move(outs);
  node->settings = settings;
  node->attrs = attrs;
  node->frame = recorded_frame();
  node->scope = recorded_scope();
  return node;
}

MetaSetPtr single(const MetaRef& meta) {
  if (meta.set->metas.size() == 1) {
    return meta.set;
  }
  auto& singles = meta.set->singles;
  singles.resize(meta.set->metas.size());
  if (!singles[meta.index].defined()) {
    singles[meta.index] = make_meta(meta->sizes, meta->strides, meta->offset, meta->dtype).set;
  }
  return singles[meta.index];
}

Value make_leaf(const MetaRef& meta, PyObject* stolen_buffer) {
  auto node = c10::make_intrusive<Node>();
  node->outs = single(meta);
  node->buffer = stolen_buffer;
  node->frame = recorded_frame();
  return {std::move(node), 0};
}

void Lost::fetch(const NodePtr& /*leaf*/) { TORCH_CHECK(false, why); }

Value make_lost(const MetaRef& meta, const std::string& why, bool uncomputed) {
  auto leaf = make_leaf(meta, nullptr);
  leaf.node->source = c10::make_intrusive<Lost>(why, uncomputed);
  return leaf;
}

Value make_fill(const MetaRef& meta, const c10::IValue& number) {
  static auto& full = op_info("aten::full", "");
  Args args;
  std::vector<int64_t> sizes(meta->sizes.begin(), meta->sizes.end());
  args.push_back(attr(sizes));
  const bool varies = number.isDouble() || number.isComplexDouble();  // neither a bool nor an integer of 2^63 or more
  const auto kind = number.isInt() ? Arg::Kind::Integer : varies ? Arg::Kind::Number : Arg::Kind::Attr;
  args.push_back({kind, 0, number});
  args.push_back(attr(static_cast<int64_t>(meta->dtype)));
  for (int i = 0; i < 3; ++i) {
    args.push_back(attr({}));
  }
  auto node = make_node(full, std::move(args), {}, single(meta));
  node->fill = true;
  return {std::move(node), 0};
}

c10::IValue unwritten(c10::ScalarType dtype) {
  const auto& context = at::globalContext();
  if (!context.deterministicAlgorithms() || !context.deterministicFillUninitializedMemory()) {
    return int64_t{0};
  }
  if (!at::isIntegralType(dtype, /*includeBool=*/true)) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  return AT_DISPATCH_V2(dtype, "unwritten",
                        AT_WRAP([] { return c10::IValue(at::Scalar(std::numeric_limits<scalar_t>::max())); }),
                        AT_EXPAND(AT_INTEGRAL_TYPES_V2), at::kBool);
}

void hash_attr(Hash& hash, const c10::IValue& v) {
  if (v.isInt()) {
    hash.mix(static_cast<uint64_t>(1));
    hash.mix(static_cast<uint64_t>(v.toInt()));
  } else if (v.isNone()) {
    hash.mix(static_cast<uint64_t>(2));
  } else if (v.isBool()) {
    hash.mix(static_cast<uint64_t>(3 + (v.toBool() ? 1 : 0)));
  } else if (v.isDouble()) {
    hash.mix(static_cast<uint64_t>(5));
    hash.mix(v.toDouble());
  } else if (v.isIntList()) {
    const auto& list = v.toIntList();
    hash.mix(static_cast<uint64_t>(6) << 32 | list.size());
    for (const int64_t e : list) {
      hash.mix(static_cast<uint64_t>(e));
    }
  } else if (v.isString()) {
    hash.mix(static_cast<uint64_t>(7));
    hash.mix(std::string_view(v.toStringRef()));
  } else if (v.isDevice()) {
    // The device of a graph is in its key; a device argument adds only its type.
    hash.mix(static_cast<uint64_t>(8) << 32 | static_cast<uint64_t>(v.toDevice().type()));
  } else if (v.isComplexDouble()) {
    hash.mix(static_cast<uint64_t>(9));
    hash.mix(v.toComplexDouble().real());
    hash.mix(v.toComplexDouble().imag());
  } else if (v.isList()) {
    const auto list = v.toListRef();
    hash.mix(static_cast<uint64_t>(10) << 32 | list.size());
    for (const auto& e : list) {
      hash_attr(hash, e);
    }
  } else if (v.isUnsigned()) {  // 2^63 or more
    hash.mix(static_cast<uint64_t>(11));
    hash.mix(v.toUInt());
  } else {
    TORCH_CHECK(false, "[record] an argument of type ", v.tagKind(),
                " cannot be recorded; pass a number, a list or a tensor");
  }
}

void release_object(PyObject* object) {
  if (object == nullptr || !Py_IsInitialized()) {
    return;
  }
  if (no_python == 0 && PyGILState_Check()) {
    Py_DECREF(object);
    return;
  }
  auto& queue = released();
  const auto drain = [](void*) {
    {
      const std::lock_guard<std::mutex> lock(released().mutex);
      released().asked = false;
    }
    drain_released();
    return 0;
  };
  const std::lock_guard<std::mutex> lock(queue.mutex);
  queue.objects.push_back(object);
  if (!queue.asked) {
    // The interpreter takes only so many calls; the next object asks again where it took none.
    queue.asked = Py_AddPendingCall(drain, nullptr) == 0;
  }
}

void drain_released() {
  std::vector<PyObject*> objects;
  {
    auto& queue = released();
    const std::lock_guard<std::mutex> lock(queue.mutex);
    objects.swap(queue.objects);
  }
  for (auto* object : objects) {
    Py_DECREF(object);
  }
}

uint64_t node_sequence() { return next_sequence.load(std::memory_order_relaxed); }

NoPython::NoPython() { ++no_python; }
NoPython::~NoPython() { --no_python; }

}  // namespace torch_xla
