#include "ir/op_info.h"

#include <ATen/core/enum_tag.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "base/fork.h"

namespace torch_xla {

namespace {

std::atomic<bool> special_numbers{true};
std::atomic<bool> constants_only{false};

ArgKind kind_of(const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::TensorType:
      return ArgKind::Tensor;
    case c10::TypeKind::NumberType:
      return ArgKind::Number;
    case c10::TypeKind::GeneratorType:
      return ArgKind::Generator;
    case c10::TypeKind::OptionalType:
      return kind_of(*type.expectRef<c10::OptionalType>().getElementType());
    case c10::TypeKind::ListType: {
      const auto& element = *type.expectRef<c10::ListType>().getElementType();
      if (element.kind() == c10::TypeKind::OptionalType) {
        return kind_of(element) == ArgKind::Tensor ? ArgKind::OptTensorList : ArgKind::Attr;
      }
      const auto kind = kind_of(element);
      return kind == ArgKind::Tensor   ? ArgKind::TensorList
             : kind == ArgKind::Number ? ArgKind::NumberList
                                       : (kind == ArgKind::Generator ? kind : ArgKind::Attr);
    }
    default:
      return ArgKind::Attr;
  }
}

// How many optional arguments `other` has beyond those of `writing` without its out= ones; -1 where they do not match.
int extra_inputs(const c10::FunctionSchema& writing, const c10::FunctionSchema& other) {
  std::vector<const c10::Argument*> ours;
  for (const auto& a : writing.arguments()) {
    if (!a.is_out()) {
      ours.push_back(&a);
    }
  }
  const auto& theirs = other.arguments();
  if (ours.size() > theirs.size()) {
    return -1;
  }
  for (size_t i = 0; i < ours.size(); ++i) {
    // Compared as text: an alias annotation makes no other type.
    if (ours[i]->name() != theirs[i].name() || *ours[i]->real_type() != *theirs[i].real_type()) {
      return -1;
    }
  }
  for (size_t i = ours.size(); i < theirs.size(); ++i) {
    // `arange.start_step` has dtype, layout, device and pin_memory, which an out= tensor decides.
    if (!theirs[i].kwarg_only() || !theirs[i].default_value() || !theirs[i].default_value()->isNone()) {
      return -1;
    }
  }
  return static_cast<int>(theirs.size() - ours.size());
}

// A float that is no Scalar shapes most programs (`eps`), but those of `_fused_adamw` follow the user's schedule.
bool is_optimizer_step(const c10::FunctionSchema& schema) {
  return schema.name().rfind("aten::_fused_", 0) == 0 && !schema.arguments().empty() &&
         kind_of(*schema.arguments()[0].type()) == ArgKind::TensorList;
}

Form form_of(const std::string& name) {
  static const std::unordered_map<std::string, Form> forms{
      {"aten.as_strided.default", Form::AsStrided}, {"aten.as_strided_scatter.default", Form::AsStridedScatter},
      {"aten.index.Tensor", Form::Index},           {"aten.index.Tensor_out", Form::Index},
      {"aten._unsafe_index.Tensor", Form::Index},   {"aten.unbind.int", Form::Chunks},
      {"aten.split.Tensor", Form::Chunks},          {"aten.split_with_sizes.default", Form::Chunks},
  };
  const auto it = forms.find(name);
  return it == forms.end() ? Form::Plain : it->second;
}

struct View {
  Inverse inverse;
  const char* scatter = nullptr;
  SelfOverlap self_overlap = SelfOverlap::Never;
  LazyBit lazy_bit = LazyBit::None;
};

// The views that have steps of their own, which XLA makes better code of than of strides; null for others.
const View* view_of(const std::string& name) {
  static const std::unordered_map<std::string, View> views{
      {"aten.view.default", {Inverse::Shape}},
      {"aten._reshape_alias.default", {Inverse::Shape}},
      {"aten.squeeze.default", {Inverse::Shape}},
      {"aten.squeeze.dim", {Inverse::Shape}},
      {"aten.squeeze.dims", {Inverse::Shape}},
      {"aten.unsqueeze.default", {Inverse::Shape}},
      {"aten.expand.default", {Inverse::Shape, nullptr, SelfOverlap::WhereLarger}},
      {"aten.unfold.default", {Inverse::Shape, nullptr, SelfOverlap::Always}},
      {"aten.select.int", {Inverse::Scatter, "aten::select_scatter"}},
      {"aten.slice.Tensor", {Inverse::Scatter, "aten::slice_scatter"}},
      {"aten.diagonal.default", {Inverse::Scatter, "aten::diagonal_scatter"}},
      {"aten.as_strided.default", {Inverse::Scatter, "aten::as_strided_scatter"}},
      {"aten.transpose.int", {Inverse::Self}},
      {"aten.t.default", {Inverse::Self}},
      {"aten._conj.default", {Inverse::Self, nullptr, SelfOverlap::Never, LazyBit::Conjugate}},
      {"aten._neg_view.default", {Inverse::Self, nullptr, SelfOverlap::Never, LazyBit::Negative}},
      {"aten.permute.default", {Inverse::Permute}},
      {"aten.view_as_real.default", {Inverse::Complex}},
      {"aten.view_as_complex.default", {Inverse::Complex}},
      {"aten.view.dtype", {Inverse::Bitcast}},
  };
  const auto it = views.find(name);
  return it == views.end() ? nullptr : &it->second;
}

// Whether an argument is a whole or floating-point number, or a list of them, and neither an enumeration nor a Scalar.
bool is_plain_number(const c10::Argument& argument) {
  auto type = argument.real_type();
  if (const auto optional = type->cast<c10::OptionalType>()) {
    type = optional->getElementType();
  }
  if (const auto list = type->cast<c10::ListType>()) {
    type = list->getElementType();
  }
  return type->kind() == c10::TypeKind::IntType || type->kind() == c10::TypeKind::SymIntType ||
         type->kind() == c10::TypeKind::FloatType;
}

bool writes(const c10::FunctionSchema& schema) {
  for (const auto& a : schema.arguments()) {
    if (a.alias_info() != nullptr && a.alias_info()->isWrite()) {
      return true;
    }
  }
  return false;
}

int8_t default_of(const c10::Argument& argument) {
  const auto value = argument.default_value();
  return value && value->isInt() && (value->toInt() == 0 || value->toInt() == 1) ? static_cast<int8_t>(value->toInt())
                                                                                 : int8_t{-1};
}

// What is known of the operators, by the address of their name, which lives in the dispatcher as long as they do.
// Entries are never deleted, since nodes point to them, but an operator that is taken back (a library's scope ends, a
// notebook cell runs again) loses its entry, and counts how often that happened.
struct OpRegistry {
  ForkSafe<std::shared_mutex, LockOrder::Operators> mutex;
  std::atomic<uint64_t> invalidations{0};  // entries that were lost
  std::unordered_map<const void*, OpInfo*> by_address;
  std::unordered_map<c10::OperatorName, uint64_t> redefinitions;
  std::unordered_map<std::string, std::vector<c10::OperatorName>> overloads;  // of all operators, by their name

  template <class Test>
  void invalidate(Test test) {
    for (auto entry = by_address.begin(); entry != by_address.end();) {
      const bool lost = test(*entry->second);
      invalidations.fetch_add(lost ? 1 : 0, std::memory_order_release);
      entry = lost ? by_address.erase(entry) : std::next(entry);
    }
  }
};

// Where the functional form of an operator that writes is looked for.
std::vector<std::string> functional_names(const std::string& name) {
  std::vector<std::string> names{name, name + "_functional"};
  if (name.back() == '_') {
    const auto base = name.substr(0, name.size() - 1);
    names.insert(names.begin(), {base, base + "_functional"});
    if (base.rfind("aten::__i", 0) == 0) {  // `x >>= n` is `__irshift__`, which writes what `__rshift__` gives
      names.insert(names.begin(), "aten::__" + name.substr(9));
    }
  }
  return names;
}

// The dispatcher tells it of all operators there are, and then of each that comes or goes.
struct Listener final : c10::OpRegistrationListener {
  explicit Listener(OpRegistry& r) : registry(r) {}
  void onOperatorRegistered(const c10::OperatorHandle& op) override {
    const auto& added = op.operator_name();
    const std::unique_lock<std::shared_mutex> lock(registry.mutex);
    registry.overloads[added.name].push_back(added);
    // One that had no functional form may have one now.
    registry.invalidate([&](const OpInfo& info) {
      if (info.written.empty() || info.functional != nullptr) {
        return false;
      }
      const auto names = functional_names(info.op.schema().name());
      return std::find(names.begin(), names.end(), added.name) != names.end();
    });
  }
  void onOperatorDeregistered(const c10::OperatorHandle& op) override {
    const auto& name = op.operator_name();
    const std::unique_lock<std::shared_mutex> lock(registry.mutex);
    auto& overloads = registry.overloads[name.name];
    overloads.erase(std::remove(overloads.begin(), overloads.end(), name), overloads.end());
    ++registry.redefinitions[name];
    const auto it = registry.by_address.find(&name);
    if (it != registry.by_address.end()) {
      const auto* const lost = it->second;
      registry.invalidate([&](const OpInfo& info) { return &info == lost || info.functional == lost; });
    }
  }
  OpRegistry& registry;
};

OpRegistry& op_registry() {
  static auto* const registry = [] {
    auto* created = new OpRegistry();
    static auto* const registration = new c10::RegistrationHandleRAII(
        c10::Dispatcher::singleton().addRegistrationListener(std::make_unique<Listener>(*created)));
    (void)registration;
    return created;
  }();
  return *registry;
}

std::vector<c10::OperatorName> overloads(const std::string& name) {
  auto& ops = op_registry();
  const std::shared_lock<std::shared_mutex> lock(ops.mutex);
  const auto it = ops.overloads.find(name);
  return it == ops.overloads.end() ? std::vector<c10::OperatorName>() : it->second;
}

OpInfo* find_functional(const c10::OperatorHandle& op, int& extra) {
  const auto& schema = op.schema();
  for (const auto& name : functional_names(schema.name())) {
    for (const auto& candidate : overloads(name)) {
      const auto handle = c10::Dispatcher::singleton().findSchema(candidate);
      if (!handle || writes(handle->schema())) {
        continue;
      }
      extra = extra_inputs(schema, handle->schema());
      if (extra >= 0) {
        return &op_info(*handle);
      }
    }
  }
  return nullptr;
}

}  // namespace

OpInfo::OpInfo(const c10::OperatorHandle& handle) : op(handle) {
  const auto& schema = handle.schema();
  TORCH_CHECK(schema.getNamespace() != std::string_view("c10d"), "[process group] got a tensor on device xla in ",
              schema.name(), " of a group that has no backend for it, expected backend 'xla'; call ",
              "torch.distributed.init_process_group('xla'), or torch_xla.experimental.use_as_accelerator() before ",
              "(XLA_USE_AS_ACCELERATOR=1), which makes it the default");
  name = schema.name() + "." + (schema.overload_name().empty() ? "default" : schema.overload_name());
  name.replace(name.find("::"), 2, ".");
  hash.mix(std::string_view(name));
  if (name == "aten.select.int") {
    element = 2;
    element_rank = 1;
  } else if (name == "aten.select_backward.default") {
    element = 3;
    element_rank = 0;
  }
  read_arguments();
  read_returns();
  choose_policies();
  form = form_of(name);
  if (const auto* step_form = view_of(name)) {
    inverse = step_form->inverse;
    scatter = step_form->scatter == nullptr ? nullptr : &op_info(step_form->scatter, "");
    self_overlap = step_form->self_overlap;
    lazy_bit = step_form->lazy_bit;
  }
  inplace_view = handle.hasTag(at::Tag::inplace_view);
  seeded = handle.hasTag(at::Tag::nondeterministic_seeded);
  // What only an operator's own kernel draws depends on a generator's state, which is no value.
  const bool draws =
      name.rfind("aten.", 0) != 0 && std::find(kinds.begin(), kinds.end(), ArgKind::Generator) != kinds.end();
  const bool asks = handle.hasTag(at::Tag::dynamic_output_shape) || handle.hasTag(at::Tag::data_dependent_output);
  needs_host = draws                         ? "it draws from a generator"
               : asks && form != Form::Index ? "its result depends on the values"
                                             : nullptr;
  if (!written.empty()) {
    functional = find_functional(handle, functional_extra);
    if (functional != nullptr) {
      order_as_returned();
    }
    seeded = seeded || (functional != nullptr && functional->seeded);
  }
}

void OpInfo::read_arguments() {
  const auto& schema = op.schema();
  const bool step = is_optimizer_step(schema);
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    const bool rate = step && argument.type()->kind() == c10::TypeKind::FloatType;
    kinds.push_back(rate ? ArgKind::Number : kind_of(*argument.type()));
    defaults.push_back(default_of(argument));
    has_tensor =
        has_tensor || (!argument.is_out() && (kinds.back() == ArgKind::Tensor || kinds.back() == ArgKind::TensorList));
    is_out.push_back(argument.is_out());
    aliased.push_back(argument.alias_info() != nullptr);
    has_indices = has_indices || kinds.back() == ArgKind::OptTensorList;
    if (argument.name() == "dropout_p") {
      dropout = static_cast<int>(i);
    }
    if (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) {
      written.push_back(static_cast<uint8_t>(i));
    }
  }
}

void OpInfo::read_returns() {
  const auto& schema = op.schema();
  for (const auto& result : schema.returns()) {
    int8_t which = -1;
    if (const auto* alias = result.alias_info()) {
      for (size_t w = 0; w < written.size(); ++w) {
        if (*schema.arguments()[written[w]].alias_info() == *alias) {
          which = static_cast<int8_t>(w);
        }
      }
      view = view || (written.empty() && !alias->isWrite());
    }
    return_writes.push_back(which);
  }
}

void OpInfo::choose_policies() {
  policies_ = std::make_unique<std::atomic<NumberPolicy>[]>(kinds.size());
  for (size_t i = 0; i < kinds.size(); ++i) {
    const bool scalar = kinds[i] == ArgKind::Number || kinds[i] == ArgKind::Tensor;  // which a number may stand for
    const bool plain = name.rfind("aten.", 0) == 0 && (is_plain_number(op.schema().arguments()[i]) || scalar);
    policies_[i] = scalar && has_tensor             ? NumberPolicy::Input
                   : !plain                         ? NumberPolicy::Constant
                   : static_cast<int>(i) == element ? NumberPolicy::SpecializedTracked
                                                    : NumberPolicy::Specialized;
  }
}

// The functional form gives first what this one returns, then what else it writes: `rrelu_with_noise.out` has its
// noise before its out= argument.
void OpInfo::order_as_returned() {
  std::vector<int8_t> order;
  for (const auto which : return_writes) {
    if (which >= 0 && std::find(order.begin(), order.end(), which) == order.end()) {
      order.push_back(which);
    }
  }
  for (int8_t which = 0; which < static_cast<int8_t>(written.size()); ++which) {
    if (std::find(order.begin(), order.end(), which) == order.end()) {
      order.push_back(which);
    }
  }
  std::vector<uint8_t> positions;
  for (const auto which : order) {
    positions.push_back(written[which]);
  }
  written = std::move(positions);
  for (auto& which : return_writes) {
    if (which >= 0) {
      which = static_cast<int8_t>(std::find(order.begin(), order.end(), which) - order.begin());
    }
  }
}

bool OpInfo::specialize(size_t argument) {
  learned = true;
  switch (policy(argument)) {
    case NumberPolicy::Input:
      policies_[argument] = NumberPolicy::SpecializedTracked;
      return true;
    case NumberPolicy::SpecializedTracked:
    case NumberPolicy::Specialized:
      policies_[argument] = NumberPolicy::Constant;
      return true;
    default:
      return false;
  }
}

bool OpInfo::only_writes_inputs() const {
  const auto fresh = [](int8_t which) { return which < 0; };
  const auto out = [this](uint8_t position) { return is_out[position]; };
  return !written.empty() && !inplace_view && std::none_of(return_writes.begin(), return_writes.end(), fresh) &&
         std::none_of(written.begin(), written.end(), out);
}

namespace {

// The operators a thread asked for lately, to be had without a lock.
struct Recent {
  const void* address;
  uint64_t invalidations;
  OpInfo* info;
};
constexpr size_t kRecent = 512;
thread_local std::array<Recent, kRecent> recent{};

OpInfo& look_up(const c10::OperatorHandle& op) {
  auto& ops = op_registry();
  const void* const address = &op.operator_name();
  {
    const std::shared_lock<std::shared_mutex> lock(ops.mutex);
    const auto it = ops.by_address.find(address);
    if (it != ops.by_address.end()) {
      return *it->second;
    }
  }
  auto info = std::make_unique<OpInfo>(op);
  const std::unique_lock<std::shared_mutex> lock(ops.mutex);
  auto& entry = ops.by_address[address];
  if (entry == nullptr) {
    const auto times = ops.redefinitions.find(op.operator_name());
    info->redefinitions = times == ops.redefinitions.end() ? 0 : times->second;
    info->hash.mix(info->redefinitions);
    entry = info.release();
  }
  return *entry;
}

}  // namespace

OpInfo& op_info(const c10::OperatorHandle& op) {
  const void* const address = &op.operator_name();
  auto& entry = recent[reinterpret_cast<uintptr_t>(address) / 64 % kRecent];
  const auto invalidations = op_registry().invalidations.load(std::memory_order_acquire);
  if (entry.address != address || entry.invalidations != invalidations) {
    entry = {address, invalidations, &look_up(op)};
  }
  return *entry.info;
}

std::unordered_map<std::string, uint64_t> op_counts() {
  auto& ops = op_registry();
  std::unordered_map<std::string, uint64_t> counts;
  const std::shared_lock<std::shared_mutex> lock(ops.mutex);
  for (const auto& [_, info] : ops.by_address) {
    if (const auto calls = info->calls.load(std::memory_order_relaxed)) {
      const auto start = info->name.find('.') + 1;
      auto name = info->name.substr(start, info->name.find('.', start) - start);
      if (name.back() == '_' && name.front() != '_') {
        name.pop_back();  // `add_` counts with `add`
      }
      counts[name] += calls;
    }
  }
  return counts;
}

OpInfo& op_info(const char* name, const char* overload) {
  return op_info(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload));
}

bool is_special_number(const c10::IValue& number) {
  if (number.isBool()) {
    return true;
  }
  return number.isInt() && (number.toInt() == 0 || number.toInt() == 1) &&
         special_numbers.load(std::memory_order_relaxed);
}

void set_special_numbers(bool on) { special_numbers.store(on, std::memory_order_relaxed); }

std::atomic<bool> wide_floats{true}, wide_integers{true};

bool must_be_constant(const c10::IValue& number) {
  const bool all = constants_only.load(std::memory_order_relaxed);
  if (all || wide_integers) {
    return all;
  }
  if (number.isList()) {
    const auto list = number.toListRef();
    return std::any_of(list.begin(), list.end(), &must_be_constant);
  }
  return number.isInt() && number.toInt() != static_cast<int32_t>(number.toInt());
}
void set_all_numbers_constant(bool on) { constants_only.store(on, std::memory_order_relaxed); }

}  // namespace torch_xla
