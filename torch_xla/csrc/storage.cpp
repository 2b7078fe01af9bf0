#include "storage.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <numeric>

#include "op_info.h"

namespace torch_xla {

namespace {

constexpr size_t kMaxDevices = 512;

struct Registry {
  std::mutex mutex;
  std::array<Storage*, kMaxDevices> heads{};
  std::array<Storage*, kMaxDevices> tails{};
  std::array<ViewStep*, kMaxDevices> views{};  // those that remember a value
};
Registry& registry() {
  static auto* const r = new Registry();
  return *r;
}

Arg input_arg() { return {Arg::Kind::Input, 0, {}}; }
Arg attr(c10::IValue v) { return {Arg::Kind::Attr, 0, std::move(v)}; }
std::vector<int64_t> int_list(c10::IntArrayRef a) { return {a.begin(), a.end()}; }

// A single-result node over one or two values.
Value apply(OpInfo& op, Inputs inputs, Args args, const MetaRef& out) {
  auto set = out.set->metas.size() == 1 ? out.set : make_meta(out->sizes, out->strides, out->offset, out->dtype).set;
  return {make_node(op, std::move(args), std::move(inputs), std::move(set)), 0};
}

Value forward(const ViewStep& step, const Value& in) {
  return {make_node(*step.op, step.args, {in}, step.outs), step.out};
}

Value reshape(const Value& v, const MetaRef& out) {
  static auto& view = op_info("aten::view", "");
  return apply(view, {v}, {input_arg(), attr(int_list(out->sizes))}, out);
}

Value slice_scatter(const Value& base, const Value& v, int64_t dim, int64_t start, int64_t end, const MetaRef& out) {
  static auto& op = op_info("aten::slice_scatter", "");
  return apply(op, {base, v}, {input_arg(), input_arg(), attr(dim), attr(start), attr(end), attr(int64_t{1})}, out);
}

int64_t wrap(int64_t dim, size_t rank) { return dim < 0 ? dim + static_cast<int64_t>(rank) : dim; }

// The value of a step's input after its output became `v`; `base` is the input's value before.
Value inverse(const ViewStep& step, const Value& base, const Value& v) {
  const auto& name = step.op->name;
  const auto& args = step.args;
  const auto& in = step.in;
  if (name == "aten.select.int") {
    static auto& op = op_info("aten::select_scatter", "");
    return apply(op, {base, v}, {input_arg(), input_arg(), args[1], args[2]}, in);
  }
  if (name == "aten.slice.Tensor") {
    static auto& op = op_info("aten::slice_scatter", "");
    return apply(op, {base, v}, {input_arg(), input_arg(), args[1], args[2], args[3], args[4]}, in);
  }
  if (name == "aten.diagonal.default") {
    static auto& op = op_info("aten::diagonal_scatter", "");
    return apply(op, {base, v}, {input_arg(), input_arg(), args[1], args[2], args[3]}, in);
  }
  if (name == "aten.as_strided.default") {
    static auto& op = op_info("aten::as_strided_scatter", "");
    return apply(op, {base, v}, {input_arg(), input_arg(), args[1], args[2], args[3]}, in);
  }
  if (name == "aten.transpose.int") {
    return apply(*step.op, {v}, {input_arg(), args[1], args[2]}, in);
  }
  if (name == "aten.t.default") {
    return apply(*step.op, {v}, {input_arg()}, in);
  }
  if (name == "aten.permute.default") {
    const auto dims = args[1].value.toIntVector();
    std::vector<int64_t> back(dims.size());
    for (size_t i = 0; i < dims.size(); ++i) {
      back[wrap(dims[i], dims.size())] = static_cast<int64_t>(i);
    }
    return apply(*step.op, {v}, {input_arg(), attr(back)}, in);
  }
  if (name == "aten.unbind.int") {
    static auto& op = op_info("aten::select_scatter", "");
    return apply(op, {base, v}, {input_arg(), input_arg(), args[1], attr(static_cast<int64_t>(step.out))}, in);
  }
  if (name == "aten.split.Tensor" || name == "aten.split_with_sizes.default") {
    const auto dim = wrap(args[2].value.toInt(), in->sizes.size());
    int64_t start = 0;
    for (uint32_t i = 0; i < step.out; ++i) {
      start += step.outs->metas[i].sizes[dim];
    }
    return slice_scatter(base, v, dim, start, start + step.outs->metas[step.out].sizes[dim], in);
  }
  if (name == "aten.view_as_real.default" || name == "aten.view_as_complex.default") {
    static auto& real = op_info("aten::view_as_real", "");
    static auto& complex = op_info("aten::view_as_complex", "");
    return apply(name == "aten.view_as_real.default" ? complex : real, {v}, {input_arg()}, in);
  }
  if (name == "aten._conj.default" || name == "aten._neg_view.default") {
    return apply(*step.op, {v}, {input_arg()}, in);
  }
  if (name == "aten.view.dtype") {
    return apply(*step.op, {v}, {input_arg(), attr(static_cast<int64_t>(in->dtype))}, in);
  }
  // Everything else only regroups the dimensions.
  return reshape(v, in);
}

ViewPath make_step(ViewPath parent, OpInfo& op, Args args, MetaRef in, MetaSetPtr outs, uint32_t out) {
  auto step = c10::make_intrusive<ViewStep>();
  step->repeats = (parent.defined() && parent->repeats) ||
                  (op.name == "aten.expand.default" && outs->metas[out].numel() != in->numel()) ||
                  op.name == "aten.unfold.default";
  step->parent = std::move(parent);
  step->op = &op;
  step->args = std::move(args);
  step->in = std::move(in);
  step->outs = std::move(outs);
  step->out = out;
  return step;
}

// Steps from a base tensor to its memory as one contiguous dimension of `dtype`.
ViewPath memory_path(const MetaRef& base, at::ScalarType dtype) {
  static auto& permute = op_info("aten::permute", "");
  static auto& view = op_info("aten::view", "");
  static auto& view_dtype = op_info("aten::view", "dtype");
  static auto& view_as_real = op_info("aten::view_as_real", "");
  ViewPath path;
  MetaRef meta = base;
  if (!meta->contiguous()) {
    std::vector<int64_t> order(meta->sizes.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return meta->strides[a] > meta->strides[b]; });
    std::vector<int64_t> sizes;
    for (const auto d : order) {
      sizes.push_back(meta->sizes[d]);
    }
    auto permuted = contiguous_meta(sizes, meta->dtype);
    path = make_step(path, permute, {input_arg(), attr(order)}, meta, permuted.set, 0);
    meta = permuted;
  }
  if (meta->sizes.size() != 1) {
    auto flat = contiguous_meta({meta->numel()}, meta->dtype);
    path = make_step(path, view, {input_arg(), attr(std::vector<int64_t>{meta->numel()})}, meta, flat.set, 0);
    meta = flat;
  }
  if (meta->dtype != dtype) {
    if (c10::isComplexType(meta->dtype) && dtype == c10::toRealValueType(meta->dtype)) {
      auto pairs = contiguous_meta({meta->sizes[0], 2}, dtype);
      path = make_step(path, view_as_real, {input_arg()}, meta, pairs.set, 0);
      auto flat = contiguous_meta({2 * meta->sizes[0]}, dtype);
      path = make_step(path, view, {input_arg(), attr(std::vector<int64_t>{2 * meta->sizes[0]})}, pairs, flat.set, 0);
    } else {
      const auto bytes = meta->sizes[0] * static_cast<int64_t>(c10::elementSize(meta->dtype));
      auto cast = contiguous_meta({bytes / static_cast<int64_t>(c10::elementSize(dtype))}, dtype);
      path = make_step(path, view_dtype, {input_arg(), attr(static_cast<int64_t>(dtype))}, meta, cast.set, 0);
    }
  }
  return path;
}

// Where an expanded tensor was written, the element that changed stands for all that share its memory. Returns the
// value with one element for each, and its shape.
std::pair<Value, MetaRef> without_repeats(Value v, Value old, MetaRef meta) {
  static auto& ne = op_info("aten::ne", "Tensor");
  static auto& to_copy = op_info("aten::_to_copy", "");
  static auto& argmax = op_info("aten::argmax", "");
  static auto& gather = op_info("aten::gather", "");
  for (size_t d = 0; d < meta->sizes.size(); ++d) {
    if (meta->strides[d] != 0 || meta->sizes[d] <= 1) {
      continue;
    }
    const auto dim = attr(static_cast<int64_t>(d));
    auto sizes = meta->sizes;
    sizes[d] = 1;
    auto bytes = apply(ne, {v, old}, {input_arg(), input_arg()}, contiguous_meta(meta->sizes, at::kBool));
    Args cast{input_arg(), attr(static_cast<int64_t>(at::kByte)), attr({}), attr({}), attr({}), attr(false), attr({})};
    bytes = apply(to_copy, {std::move(bytes)}, std::move(cast), contiguous_meta(meta->sizes, at::kByte));
    const auto index =
        apply(argmax, {std::move(bytes)}, {input_arg(), dim, attr(true)}, contiguous_meta(sizes, at::kLong));
    meta = make_meta(sizes, meta->strides, meta->offset, meta->dtype);
    for (auto* value : {&v, &old}) {
      *value = apply(gather, {*value, index}, {input_arg(), dim, input_arg(), attr(false)}, meta);
    }
  }
  return {std::move(v), std::move(meta)};
}

ViewPath strided_path(const MetaRef& base, const MetaRef& meta) {
  static auto& as_strided = op_info("aten::as_strided", "");
  auto path = memory_path(base, meta->dtype);
  const MetaRef in = path.defined() ? MetaRef{path->outs, path->out} : base;
  return make_step(std::move(path), as_strided,
                   {input_arg(), attr(int_list(meta->sizes)), attr(int_list(meta->strides)), attr(meta->offset)}, in,
                   make_meta(meta->sizes, meta->strides, meta->offset, meta->dtype).set, 0);
}

std::vector<const ViewStep*> steps_of(const ViewPath& path) {
  std::vector<const ViewStep*> steps;
  for (auto* s = path.get(); s != nullptr; s = s->parent.get()) {
    steps.push_back(s);
  }
  std::reverse(steps.begin(), steps.end());
  return steps;
}

// Whether a view shows the storage's own elements in their own places, as the transpose of a transpose does.
bool shows_whole(const ViewPath& path, const Meta& base) {
  static const auto& conjugate = op_info("aten::_conj", "");
  static const auto& negative = op_info("aten::_neg_view", "");
  const auto& shown = path->outs->metas[path->out];
  if (shown.layout != base.layout || shown.offset != base.offset) {
    return false;
  }
  const auto steps = steps_of(path);
  return std::none_of(steps.begin(), steps.end(),
                      [](const ViewStep* s) { return s->op == &conjugate || s->op == &negative; });
}

// The value in memory order, with zeros behind it.
Value padded(const Value& v, const MetaRef& meta, const MetaRef& grown) {
  static auto& pad = op_info("aten::constant_pad_nd", "");
  const auto path = memory_path(meta, meta->dtype);  // keeps its steps alive
  Value flat = v;
  for (const auto* step : steps_of(path)) {
    flat = forward(*step, flat);
  }
  const std::vector<int64_t> behind{0, grown->sizes[0] - meta->numel()};
  return apply(pad, {std::move(flat)}, {input_arg(), attr(behind), attr(int64_t{0})}, grown);
}

}  // namespace

namespace {
std::mutex& recorder_mutex() {
  static auto* const mutex = new std::mutex();
  return *mutex;
}
}  // namespace

namespace {
// A forked child, such as a loader's worker, frees tensors it inherited: the locks must be free in it, whatever other
// threads of the parent held.
const int at_fork = pthread_atfork(
    [] {
      recorder_mutex().lock();
      registry().mutex.lock();
    },
    [] {
      registry().mutex.unlock();
      recorder_mutex().unlock();
    },
    [] {
      registry().mutex.unlock();
      recorder_mutex().unlock();
    });
}  // namespace

RecorderLock::RecorderLock() { recorder_mutex().lock(); }
RecorderLock::~RecorderLock() { recorder_mutex().unlock(); }

std::mutex& registry_mutex() { return registry().mutex; }
Storage* registry_head(c10::DeviceIndex device) { return registry().heads[device]; }

namespace {

// Addresses that no process has, so that reading at one fails at once. Storages without bytes take one too, as their
// id.
uintptr_t new_address(int64_t bytes) {
  constexpr uintptr_t kFirst = uintptr_t{1} << 56;
  constexpr uintptr_t kAlignment = 64;
  static std::atomic<uintptr_t> next{kFirst};
  return next.fetch_add((static_cast<uintptr_t>(bytes) / kAlignment + 1) * kAlignment, std::memory_order_relaxed);
}

c10::DataPtr data_at(uintptr_t address, int64_t bytes, c10::DeviceIndex device) {
  auto* const data = bytes == 0 ? nullptr : reinterpret_cast<void*>(address);  // NOLINT(performance-no-int-to-ptr)
  return {data, c10::Device(c10::DeviceType::XLA, device)};
}

}  // namespace

Storage::Storage(Value v, MetaRef m, c10::DeviceIndex d)
    : Storage(new_address(m->bytes), std::move(v), std::move(m), d) {}

Storage::Storage(uintptr_t address, Value&& v, MetaRef&& m, c10::DeviceIndex d)
    : StorageImpl(use_byte_size_t(), m->bytes, data_at(address, m->bytes, d), nullptr, false),
      id(address),
      value(std::move(v)),
      meta(std::move(m)),
      index(d) {
  TORCH_CHECK(static_cast<size_t>(d) < kMaxDevices, "[device] xla:", static_cast<int>(d), " is out of range");
  auto& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  previous = r.tails[index];
  (previous != nullptr ? previous->next : r.heads[index]) = this;
  r.tails[index] = this;
}

void Storage::let_go() {
  if (!std::exchange(listed_, false)) {
    return;
  }
  auto& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  (previous != nullptr ? previous->next : r.heads[index]) = next;
  (next != nullptr ? next->previous : r.tails[index]) = previous;
}

void Storage::release_resources() {
  let_go();
  value = synced = origin = {};
  StorageImpl::release_resources();
}

void Storage::resize(size_t bytes, const MetaRef& like, std::vector<Value>& garbage) {
  if (bytes == nbytes()) {
    return;
  }
  const bool holds = value.node->error == nullptr && meta->numel() != 0;
  if (bytes == 0) {
    garbage.push_back(std::exchange(value, make_leaf(meta, nullptr)));
    value.node->error = std::make_unique<std::string>(
        "[storage] the tensor's memory was freed by resize_(0) of its storage; give the storage its size back first");
  } else if (bytes > static_cast<size_t>(meta->bytes) || (!holds && like.set.defined())) {
    const auto item = c10::elementSize(meta->dtype);
    const auto count = static_cast<int64_t>((bytes + item - 1) / item);
    const bool fits = !holds && like.set.defined() && like->offset == 0 && static_cast<size_t>(like->bytes) == bytes;
    auto grown = fits ? like : contiguous_meta({count}, meta->dtype);
    garbage.push_back(std::exchange(value, holds ? padded(value, meta, grown) : make_fill(grown, int64_t{0})));
    meta = std::move(grown);
    ++layouts;
  } else if (!holds) {
    garbage.push_back(std::exchange(value, make_fill(meta, int64_t{0})));
  }
  ++generation;
  garbage.push_back(std::exchange(synced, {}));
  garbage.push_back(std::exchange(origin, holds || bytes == 0 ? Value() : value));
  const auto size = static_cast<int64_t>(bytes);
  set_data_ptr_noswap(data_at(new_address(size), size, index));
  set_nbytes(bytes);
}

size_t extent(const Meta& meta) {
  int64_t last = meta.offset;
  for (size_t i = 0; i < meta.sizes.size(); ++i) {
    if (meta.sizes[i] == 0) {
      return 0;
    }
    last += (meta.sizes[i] - 1) * meta.strides[i];
  }
  return static_cast<size_t>(last + 1) * c10::elementSize(meta.dtype);
}

ViewStep::~ViewStep() {
  if (device >= 0) {
    auto& r = registry();
    const std::lock_guard<std::mutex> lock(r.mutex);
    (previous != nullptr ? previous->next : r.views[device]) = next;
    if (next != nullptr) {
      next->previous = previous;
    }
  }
  // As with nodes, a long chain must not be released by nested destructors.
  auto step = std::move(parent);
  while (step.defined() && step.use_count() == 1) {
    auto up = std::move(step->parent);
    step = std::move(up);
  }
}

void ViewStep::remember(Value v, const Storage& storage) {
  value = std::move(v);
  generation = storage.generation;
  if (device < 0) {
    auto& r = registry();
    const std::lock_guard<std::mutex> lock(r.mutex);
    device = storage.index;
    next = r.views[device];
    if (next != nullptr) {
      next->previous = this;
    }
    r.views[device] = this;
  }
}

void forget_views(c10::DeviceIndex device, std::vector<Value>& garbage) {
  auto& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  for (auto* step = r.views[device]; step != nullptr;) {
    auto* const following = step->next;
    garbage.push_back(std::move(step->value));
    step->value = {};
    step->device = -1;
    step->previous = step->next = nullptr;
    step = following;
  }
  r.views[device] = nullptr;
}

Alias new_alias(Value value, MetaRef meta, c10::DeviceIndex device) {
  Alias alias;
  alias.storage = c10::make_intrusive<Storage>(std::move(value), meta, device);
  alias.meta = std::move(meta);
  return alias;
}

// The storage has another layout since: what the tensor is, is still told by its strides.
void Alias::find_path() {
  bool conjugate = false;
  bool negative = false;
  for (auto* step = path.get(); step != nullptr; step = step->parent.get()) {
    conjugate = conjugate != (step->op->name == "aten._conj.default");
    negative = negative != (step->op->name == "aten._neg_view.default");
  }
  path = memory_alias(storage, meta).path;
  layout = storage->layouts;
  const auto add = [&](const char* name) {
    path = make_step(path, op_info(name, ""), {input_arg()}, meta,
                     make_meta(meta->sizes, meta->strides, meta->offset, meta->dtype).set, 0);
  };
  if (conjugate) {
    add("aten::_conj");
  }
  if (negative) {
    add("aten::_neg_view");
  }
}

const Value& Alias::current() {
  if (layout != storage->layouts) {
    find_path();
  }
  resolve(storage->value);
  Value* latest = &storage->value;
  if (path.defined()) {
    // Down to the nearest step that still knows its value, and up again.
    std::vector<ViewStep*> behind;
    auto* step = path.get();
    for (; step != nullptr && (!step->value || step->generation != storage->generation); step = step->parent.get()) {
      behind.push_back(step);
    }
    if (step != nullptr) {
      resolve(step->value);
      latest = &step->value;
    }
    for (size_t i = behind.size(); i-- > 0;) {
      behind[i]->remember(forward(*behind[i], *latest), *storage);
      latest = &behind[i]->value;
    }
  }
  TORCH_CHECK(latest->node->error == nullptr, latest->node->error ? *latest->node->error : std::string());
  return *latest;
}

void Alias::write(Value v) {
  if (layout != storage->layouts) {
    find_path();
  }
  ViewPath through = path;
  if (path.defined() && path->repeats) {  // only memory says which elements a write reaches
    auto [once, written] = without_repeats(std::move(v), current(), meta);
    v = std::move(once);
    through = strided_path(storage->meta, written);
  }
  ++storage->generation;
  if (!path.defined()) {
    storage->value = std::move(v);
    return;
  }
  const auto steps = steps_of(through);
  resolve(storage->value);
  std::vector<Value> inputs{storage->value};
  for (size_t i = 0; i + 1 < steps.size(); ++i) {
    inputs.push_back(forward(*steps[i], inputs.back()));
  }
  Value back = v;
  for (size_t i = steps.size(); i-- > 0;) {
    back = inverse(*steps[i], inputs[i], back);
  }
  storage->value = std::move(back);
  if (!path->repeats) {  // a view with repeated elements must see its own write, so it replays
    path->remember(std::move(v), *storage);
  }
}

Alias Alias::view(OpInfo& op, Args step_args, const MetaSetPtr& outs, uint32_t out, const NodePtr& node) const {
  Alias result;
  result.storage = storage;
  result.path = make_step(path, op, std::move(step_args), meta, outs, out);
  result.meta = {outs, out};
  if (layout == storage->layouts && shows_whole(result.path, *storage->meta)) {
    result.path = {};  // a write goes straight to the storage, and its value is the view's
  } else {
    result.path->remember({node, out}, *storage);
  }
  result.layout = layout;
  return result;
}

Alias Alias::as_strided(const MetaRef& strided) const { return memory_alias(storage, strided); }

Alias memory_alias(StoragePtr storage, const MetaRef& strided) {
  Alias result;
  const auto& base = *storage->meta;
  if (strided->layout == base.layout && strided->offset == base.offset) {
    result.meta = storage->meta;
  } else {
    result.path = strided_path(storage->meta, strided);
    result.meta = {result.path->outs, 0};
  }
  result.layout = storage->layouts;
  result.storage = std::move(storage);
  return result;
}

}  // namespace torch_xla
