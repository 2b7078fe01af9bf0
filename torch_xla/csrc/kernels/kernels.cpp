// The operators that are not recorded as nodes: making tensors, copying between devices, reading a value, rebinding.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/TracerMode.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_to_copy_native.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/empty_like_native.h>
#include <torch/library.h>

#include <numeric>

#include "base/python_hooks.h"
#include "base/user_line.h"
#include "device/capture.h"
#include "device/device.h"
#include "ir/op_info.h"
#include "record/recompute.h"
#include "record/record.h"
#include "tensor/lazy_clone.h"
#include "tensor/placement.h"
#include "tensor/tensor_impl.h"
#include "tensor/view_path.h"

namespace torch_xla {

namespace {

using at::Tensor;
using c10::IntArrayRef;

Tensor new_fill(const MetaRef& meta, c10::DeviceIndex device) {
  constexpr int64_t kAddresses = int64_t{1} << 47;  // of a process; XLA may never need the whole, and compute for years
  TORCH_CHECK_WITH(OutOfMemoryError, meta->bytes < kAddresses, "XLA out of memory. Tried to allocate ",
                   meta->bytes >> 30, ".00 GiB. [memory] got a tensor of ", meta->bytes,
                   " bytes, expected fewer than 2^47; no device can hold it");
  auto value = make_fill(meta, unwritten(meta->dtype));
  Alias alias;
  {
    const RecorderLock lock;  // another thread's barrier must not see the storage before it knows its origin
    alias = new_alias(value, meta, device);
    alias.storage->initial_fill = std::move(value);
  }
  return make_tensor(std::move(alias));
}

Tensor empty_memory_format(IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                           std::optional<at::Device> device, std::optional<bool> /*pin_memory*/,
                           std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!layout || *layout == at::kStrided, "[empty] got layout ", *layout,
              ", xla tensors are strided; use a dense tensor");
  const FrameScope frame;
  const auto type = dtype.value_or(c10::get_default_dtype_as_scalartype());
  if (format && *format != at::MemoryFormat::Contiguous && *format != at::MemoryFormat::Preserve) {
    const auto twin = at::detail::empty_meta(sizes, type, format);
    return new_fill(make_meta(twin.sizes(), twin.strides(), 0, type), device_index(device));
  }
  for (const auto s : sizes) {
    TORCH_CHECK(s >= 0, "Trying to create tensor with negative dimension ", s, ": ", sizes);
  }
  at::detail::computeStorageNbytesContiguous(sizes, c10::elementSize(type));  // raises where that overflows
  return new_fill(contiguous_meta(sizes, type), device_index(device));
}

Tensor empty_strided(IntArrayRef sizes, IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
                     std::optional<bool> /*pin_memory*/) {
  const FrameScope frame;
  const auto type = dtype.value_or(c10::get_default_dtype_as_scalartype());
  const auto twin = at::detail::empty_strided_meta(sizes, strides, type);  // PyTorch's checks
  auto meta = make_meta(sizes, strides, 0, type);
  if (twin.numel() == 0 || twin.is_non_overlapping_and_dense()) {
    return new_fill(meta, device_index(device));
  }
  const auto count = static_cast<int64_t>(twin.storage().nbytes() / twin.element_size());
  const auto memory = new_fill(contiguous_meta({count}, type), device_index(device));
  const RecorderLock lock;
  auto alias = impl_of(memory)->alias.as_strided(meta);
  return make_tensor(std::move(alias));
}

// The fill that a whole storage gets; a storage that was not written yet is one that was made with it.
Value fill_for(Storage& storage, const MetaRef& meta, const c10::IValue& number) {
  auto value = make_fill(meta, number);
  if (storage.initial_fill && storage.value == storage.initial_fill) {
    storage.initial_fill = value;
  }
  return value;
}

template <class T>
Tensor& record_fill(Tensor& self, const T& value) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("aten::fill_", std::is_same_v<T, Tensor> ? "Tensor" : "Scalar");
  torch::jit::Stack stack{self, value};
  record(op, &stack);
  return self;
}

Tensor& fill_number(Tensor& self, const at::Scalar& value) {
  {
    const FrameScope frame;
    const RecorderLock lock;
    auto& alias = impl_of(self)->alias;
    if (!alias.path.defined() && !value.isComplex() && !eager()) {
      alias.write(fill_for(*alias.storage, alias.meta, value));
      return self;
    }
  }
  return record_fill(self, value);
}

// Raises as PyTorch does where a number does not fit into a type.
void check_converts(const at::Scalar& value, at::ScalarType type) {
  switch (type) {
#define CONVERTS(ctype, name) \
  case at::ScalarType::name:  \
    (void)value.to<ctype>();  \
    break;
    AT_FORALL_SCALAR_TYPES_WITH_COMPLEX(CONVERTS)
#undef CONVERTS
    default:
      break;
  }
}

Tensor& fill_scalar(Tensor& self, const at::Scalar& value) {
  check_converts(value, self.scalar_type());
  return fill_number(self, value);
}

// The number may come from another device, as PyTorch has it everywhere.
Tensor& fill_tensor(Tensor& self, const Tensor& value) {
  if (value.device() != self.device()) {
    TORCH_CHECK(value.dim() == 0, "fill_ only supports 0-dimension value tensor but got tensor with ", value.dim(),
                " dimensions.");
    return self.fill_(value.item());
  }
  return record_fill(self, value);
}

Tensor& zero_(Tensor& self) { return fill_number(self, int64_t{0}); }

void check_broadcast(const Tensor& self, const Tensor& source) {
  if (self.sizes() == source.sizes()) {
    return;
  }
  const auto sizes = at::infer_size(self.sizes(), source.sizes());
  TORCH_CHECK(IntArrayRef(sizes) == self.sizes(), "output with shape ", self.sizes(),
              " doesn't match the broadcast shape ", IntArrayRef(sizes));
}

void write_value(const Tensor& self, Value value) { impl_of(self)->alias.write(std::move(value)); }

// The storage is about to get a leaf as its value, so there is nothing to roll back to. What it was made with, or had
// at the last barrier, is forgotten unless something was computed with it: the next program may then have that buffer.
void expect_leaf(Storage& storage, const Value& leaf) {
  const auto unused = [&](const Value& v) { return !v || v.node.use_count() == (storage.value == v ? 2U : 1U); };
  if (unused(storage.initial_fill)) {
    storage.initial_fill = {};
  }
  if (unused(storage.committed)) {
    storage.committed = leaf;
  }
}

// A whole storage gets a value that another has. What can be is made a value of its own: a graph then has the same
// inputs, and gives the same buffers away, in the step that copies a model's weights and in later ones.
Value cloned(Value value, const StoragePtr& storage) {
  const auto& node = *value.node;
  if (is_cloneable(node)) {
    auto clone = clone_leaf(value, storage);
    expect_leaf(*storage, clone);
    return clone;
  }
  if (node.fill) {
    return fill_for(*storage, {node.outs, value.index}, node.args[1].value);
  }
  return value;
}

// The value in a type; in its own it is a copy of the program's.
Value converted(Value value, at::ScalarType type) {
  static auto& to_copy = op_info("aten::_to_copy", "");
  Args args{input_arg(), attr(static_cast<int64_t>(type))};
  for (int i = 0; i < 3; ++i) {
    args.push_back(attr({}));
  }
  args.push_back(attr(false));
  args.push_back(attr({}));
  const auto meta = contiguous_meta(value.node->meta(value.index).sizes, type);
  return {make_node(to_copy, std::move(args), {std::move(value)}, meta.set), 0};
}

void copy_within(const Tensor& self, const Tensor& source) {
  static auto& expand = op_info("aten::expand", "");
  const RecorderLock lock;
  Value value = impl_of(source)->alias.current();
  const bool converts = source.scalar_type() != self.scalar_type() || is_captured(self.device().index());
  const bool records = converts || source.sizes() != self.sizes();
  if (records && current_phase() == Phase::Recomputation) {
    value = behind_barrier(value, self.device().index());
  }
  if (converts) {
    value = converted(std::move(value), self.scalar_type());
  }
  if (source.sizes() != self.sizes()) {
    value = {make_node(expand, {input_arg(), attr(self.sizes().vec()), attr(false)}, {std::move(value)},
                       contiguous_meta(self.sizes(), self.scalar_type()).set),
             0};
  }
  auto& alias = impl_of(self)->alias;
  if (!records && !alias.path.defined()) {
    value = cloned(std::move(value), alias.storage);
  }
  write_value(self, std::move(value));
}

// What a tensor of the host's brings to a device.
Tensor host_values(const Tensor& source, at::ScalarType type) {
  return source.to(at::kCPU, type).resolve_conj().resolve_neg();
}

void copy_to_device(const Tensor& self, const Tensor& source) {
  const auto values = host_values(source, self.scalar_type()).expand(self.sizes());
  auto& alias = impl_of(self)->alias;
  const auto meta = contiguous_meta(self.sizes(), self.scalar_type());
  const auto placement = alias.path.defined() ? kUnspecified : alias.storage->placement;
  auto leaf = make_upload(meta, values, self.device().index(), placement);
  const RecorderLock lock;
  if (is_captured(self.device().index())) {
    leaf = converted(std::move(leaf), self.scalar_type());  // each replay copies it
  } else if (!alias.path.defined()) {
    expect_leaf(*alias.storage, leaf);
  }
  write_value(self, std::move(leaf));
}

Tensor& copy_(Tensor& self, const Tensor& source, bool /*non_blocking*/) {
  TORCH_CHECK(source.defined(), "copy_: the source is an undefined tensor");
  if (self.is_same(source) ||
      (self.is_alias_of(source) && self.storage_offset() == source.storage_offset() && self.sizes() == source.sizes() &&
       self.strides() == source.strides() && self.dtype() == source.dtype() &&
       lazy_bits_of(impl_of(self)->alias.path) == lazy_bits_of(impl_of(source)->alias.path))) {
    return self;
  }
  if (is_xla(self)) {
    at::assert_no_internal_overlap(self);
    at::assert_no_partial_overlap(self, source);
  }
  check_broadcast(self, source);
  if (!is_xla(self)) {
    self.copy_(fetch(source));
    return self;
  }
  const FrameScope frame;
  Tensor values = source;  // no xla tensor has a conjugate or negative bit: `_conj` and `_neg_view` are recorded views
  if (is_xla(values) && values.device() != self.device()) {
    values = fetch(values);
  }
  if (is_xla(values)) {
    copy_within(self, values);
    if (eager()) {
      evaluate({self});
    }
  } else {
    copy_to_device(self, values);
  }
  return self;
}

std::vector<int64_t> strides_like(const Tensor& self) {
  return self.is_non_overlapping_and_dense() ? self.strides().vec()
                                             : at::infer_dense_strides(self.sizes(), self.strides());
}

// PyTorch's own two keep the order of strides only on devices that support as_strided, by its list.
Tensor new_like(const Tensor& self, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                std::optional<at::Device> device, std::optional<bool> pin_memory,
                std::optional<at::MemoryFormat> format) {
  if (format.value_or(at::MemoryFormat::Preserve) != at::MemoryFormat::Preserve ||
      layout.value_or(at::kStrided) != at::kStrided) {
    return at::native::empty_like(self, dtype, layout, device, pin_memory, format);
  }
  const auto options =
      self.options().merge_in(at::TensorOptions().dtype(dtype).device(device).pinned_memory(pin_memory));
  return at::empty_strided(self.sizes(), strides_like(self), options);
}

Tensor to_copy(const Tensor& self, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
               std::optional<at::Device> device, std::optional<bool> pin_memory, bool non_blocking,
               std::optional<at::MemoryFormat> format) {
  if ((device && device->type() != c10::DeviceType::XLA) || layout.value_or(at::kStrided) != at::kStrided) {
    return at::native::_to_copy(self, dtype, layout, device, pin_memory, non_blocking, format);
  }
  if (self.is_cpu() && device && !captures_here()) {  // else each replay makes it anew
    const FrameScope frame;
    // Not its Python object, whose class may refuse to say anything, as that of an uninitialized parameter does.
    const auto values = host_values(self.detach(), dtype.value_or(self.scalar_type()));
    const bool keeps_order = format.value_or(at::MemoryFormat::Preserve) == at::MemoryFormat::Preserve;
    return uploaded(values,
                    keeps_order ? strides_like(self)
                                : at::detail::empty_meta(self.sizes(), values.scalar_type(), format).strides().vec(),
                    device_index(device));
  }
  return new_like(self, dtype, layout, device, pin_memory, format).copy_(self, non_blocking);
}

// The same tensor again: no node, so not worth a recorded call. Each gradient of a backward pass comes through here.
Tensor shallow_alias(const Tensor& self, OpInfo& info) {
  if (!is_xla(self)) {  // what a FakeTensor wraps
    return at::native::alias(self);
  }
  info.calls.fetch_add(1, std::memory_order_relaxed);
  Alias alias;
  {
    const RecorderLock lock;
    alias = impl_of(self)->alias;
    alias.current();  // raises where the value is lost
  }
  return make_view(std::move(alias), self);
}
Tensor alias(const Tensor& self) {
  static auto& info = op_info("aten::alias", "");
  return shallow_alias(self, info);
}
Tensor detach(const Tensor& self) {
  static auto& info = op_info("aten::detach", "");
  return shallow_alias(self, info);
}

Tensor copy_from(const Tensor& self, const Tensor& destination, bool non_blocking) {
  Tensor d = destination;
  return copy_(d, self, non_blocking);
}

const Tensor& resize_(const Tensor& self, IntArrayRef sizes, std::optional<at::MemoryFormat> format);

Tensor copy_from_and_resize(const Tensor& self, const Tensor& destination) {
  if (destination.sizes() != self.sizes()) {
    if (is_xla(destination)) {
      resize_(destination, self.sizes(), std::nullopt);
    } else {
      destination.resize_(self.sizes());
    }
  }
  return copy_from(self, destination, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  TORCH_CHECK(self.numel() > 0, "_local_scalar_dense: Empty tensor not supported");
  note_read("aten::_local_scalar_dense");
  return fetch(self).item();
}

// Tensors of different sizes are known to differ.
bool equal(const Tensor& self, const Tensor& other) {
  if (is_xla(self) && self.device() == other.device() && self.sizes() != other.sizes()) {
    return false;
  }
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::equal", "");
  torch::jit::Stack stack{self, other};
  record(op, &stack);
  return stack.front().toBool();
}

// Keeps the leading elements in memory order; new ones are as those of a new tensor.
const Tensor& resize_(const Tensor& self, IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  if (self.sizes() == sizes && !format) {
    return self;
  }
  const auto twin = at::detail::empty_meta(sizes, self.scalar_type(), format);
  const auto meta = make_meta(twin.sizes(), twin.strides(), self.storage_offset(), self.scalar_type());
  Vector<Value> replaced;
  Alias old;
  const RecorderLock lock;
  auto& alias = impl_of(self)->alias;
  if (extent(*meta) > alias.storage->nbytes()) {
    alias.storage->resize(extent(*meta), meta, replaced);
  }
  old = rebind(self, alias.as_strided(meta));
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  check_storage_device(self, source.device());
  TORCH_CHECK(self.scalar_type() == source.scalar_type(), "Could not set tensor of type ", source.dtype(),
              " to a tensor of type ", self.dtype());
  Alias old;
  const RecorderLock lock;
  old = rebind(self, impl_of(source)->alias);
  return self;
}

Tensor& set_empty(Tensor& self) {
  return set_tensor(self, new_fill(contiguous_meta({0}, self.scalar_type()), self.device().index()));
}

void record_stream(Tensor& /*self*/, at::Stream /*stream*/) {}  // a device has one

bool is_set_to(const Tensor& self, const Tensor& other) {
  return self.is_alias_of(other) && self.sizes() == other.sizes() && self.strides() == other.strides() &&
         self.storage_offset() == other.storage_offset();
}

// Its schema hides that training writes the running statistics; the `_legit` operator says so.
std::tuple<Tensor, Tensor, Tensor> native_batch_norm(const Tensor& input, const std::optional<Tensor>& weight,
                                                     const std::optional<Tensor>& bias,
                                                     const std::optional<Tensor>& running_mean,
                                                     const std::optional<Tensor>& running_var, bool training,
                                                     double momentum, double eps) {
  static const auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::native_batch_norm", "");
  if (training && running_mean && running_mean->defined() && running_var && running_var->defined()) {
    op_info(op).calls.fetch_add(1, std::memory_order_relaxed);
    Tensor mean = *running_mean;
    Tensor var = *running_var;
    return at::_native_batch_norm_legit(input, weight, bias, mean, var, true, momentum, eps);
  }
  torch::jit::Stack stack{input, weight, bias, running_mean, running_var, training, momentum, eps};
  record(op, &stack);
  return {stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor()};
}

// Addresses memory as `as_strided` does, which the values of the tensor alone do not show.
Tensor as_strided_copy(const Tensor& self, IntArrayRef sizes, IntArrayRef strides, std::optional<int64_t> offset) {
  return self.as_strided(sizes, strides, offset).clone(at::MemoryFormat::Contiguous);
}

// Draws into a tensor of any type, as on CPU; its Meta kernel wants one of the probabilities' type.
Tensor& bernoulli_out(const Tensor& p, std::optional<at::Generator> generator, Tensor& out) {
  at::native::resize_output(out, p.sizes());
  return out.bernoulli_(p, std::move(generator));
}

// PyTorch's tracer leaves this out, and records the `_convolution` that it is made of.
void convolution(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  static const auto traced = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_convolution", "");
  if (!at::tracer::impl::is_dispatch_enabled()) {
    record(op, stack);
    return;
  }
  const bool benchmark = false, deterministic = false, cudnn = false, tf32 = false;
  torch::jit::push(stack, benchmark, deterministic, cudnn, tf32);
  traced.callBoxed(stack);
}

// Reached by `_convolution`, which looks for a backend of its own.
Tensor convolution_overrideable(const Tensor& input, const Tensor& weight, const std::optional<Tensor>& bias,
                                IntArrayRef stride, IntArrayRef padding, IntArrayRef dilation, bool transposed,
                                IntArrayRef output_padding, int64_t groups) {
  return at::convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward_overrideable(const Tensor& grad, const Tensor& input,
                                                                     const Tensor& weight, IntArrayRef stride,
                                                                     IntArrayRef padding, IntArrayRef dilation,
                                                                     bool transposed, IntArrayRef output_padding,
                                                                     int64_t groups, std::array<bool, 3> output_mask) {
  const std::vector<int64_t> bias_sizes{grad.size(1)};
  return at::convolution_backward(grad, input, weight, bias_sizes, stride, padding, dilation, transposed,
                                  output_padding, groups, output_mask);
}
}  // namespace

TORCH_LIBRARY_IMPL(aten, XLA, m) {
  m.impl("as_strided_copy", TORCH_FN(as_strided_copy));
  m.impl("empty.memory_format", TORCH_FN(empty_memory_format));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("fill_.Scalar", TORCH_FN(fill_scalar));
  m.impl("fill_.Tensor", TORCH_FN(fill_tensor));
  m.impl("zero_", TORCH_FN(zero_));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("empty_like", TORCH_FN(new_like));
  m.impl("_to_copy", TORCH_FN(to_copy));
  m.impl("alias", TORCH_FN(alias));
  m.impl("detach", TORCH_FN(detach));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("equal", TORCH_FN(equal));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_", TORCH_FN(set_empty));
  m.impl("is_set_to", TORCH_FN(is_set_to));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("bernoulli.out", TORCH_FN(bernoulli_out));
  m.impl("native_batch_norm", TORCH_FN(native_batch_norm));
  m.impl("convolution", torch::CppFunction::makeFromBoxedFunction<&convolution>());
  m.impl("convolution_overrideable", TORCH_FN(convolution_overrideable));
  m.impl("convolution_backward_overrideable", TORCH_FN(convolution_backward_overrideable));
}

}  // namespace torch_xla
