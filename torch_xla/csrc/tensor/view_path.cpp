#include "tensor/view_path.h"

#include <c10/core/WrapDimMinimal.h>

#include <algorithm>
#include <numeric>

#include "ir/op_info.h"

namespace torch_xla {

namespace {

std::vector<int64_t> int_list(c10::IntArrayRef a) { return {a.begin(), a.end()}; }

// A single-result node over one or two values.
Value apply(OpInfo& op, Inputs inputs, Args args, const MetaRef& out) {
  return {make_node(op, std::move(args), std::move(inputs), single(out)), 0};
}

Value reshape(const Value& v, const MetaRef& out) {
  static auto& view = op_info("aten::view", "");
  return apply(view, {v}, {input_arg(), attr(int_list(out->sizes))}, out);
}

// Steps from a base tensor to its memory as one contiguous dimension of `dtype`.
ViewPath memory_path(const MetaRef& base, at::ScalarType dtype) {
  static auto& permute = op_info("aten::permute", "");
  static auto& view = op_info("aten::view", "");
  static auto& view_dtype = op_info("aten::view", "dtype");
  static auto& view_as_real = op_info("aten::view_as_real", "");
  static auto& slice = op_info("aten::slice", "Tensor");
  ViewPath path;
  MetaRef meta = base;
  if (!meta->row_major) {
    std::vector<int64_t> order(meta->sizes.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int64_t a, int64_t b) { return meta->strides[a] > meta->strides[b]; });
    std::vector<int64_t> sizes;
    for (const auto d : order) {
      sizes.push_back(meta->sizes[d]);
    }
    auto permuted = contiguous_meta(sizes, meta->dtype);
    path = make_step(path, permute, {input_arg(), attr(order)}, meta, permuted.set);
    meta = permuted;
  }
  if (meta->sizes.size() != 1) {
    auto flat = contiguous_meta({meta->numel()}, meta->dtype);
    path = make_step(path, view, {input_arg(), attr(std::vector<int64_t>{meta->numel()})}, meta, flat.set);
    meta = flat;
  }
  if (meta->dtype != dtype) {
    if (c10::isComplexType(meta->dtype) && dtype == c10::toRealValueType(meta->dtype)) {
      auto pairs = contiguous_meta({meta->sizes[0], 2}, dtype);
      path = make_step(path, view_as_real, {input_arg()}, meta, pairs.set);
      auto flat = contiguous_meta({2 * meta->sizes[0]}, dtype);
      path = make_step(path, view, {input_arg(), attr(std::vector<int64_t>{2 * meta->sizes[0]})}, pairs, flat.set);
    } else {
      const auto from = static_cast<int64_t>(c10::elementSize(meta->dtype));
      const auto to = static_cast<int64_t>(c10::elementSize(dtype));
      const auto count = meta->sizes[0] * from / to;
      if (const auto read = count * to / from; read != meta->sizes[0]) {  // bytes that make no whole element
        auto front = contiguous_meta({read}, meta->dtype);
        path = make_step(path, slice, {input_arg(), attr(int64_t{0}), attr(int64_t{0}), attr(read), attr(int64_t{1})},
                         meta, front.set);
        meta = front;
      }
      auto cast = contiguous_meta({count}, dtype);
      path = make_step(path, view_dtype, {input_arg(), attr(static_cast<int64_t>(dtype))}, meta, cast.set);
    }
  }
  return path;
}

// Whether strides may lead to some element in two ways: each has to go beyond all that smaller ones reach.
bool may_overlap_itself(const Meta& meta) {
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (size_t d = 0; d < meta.sizes.size(); ++d) {
    if (meta.sizes[d] > 1) {
      dims.emplace_back(meta.strides[d], meta.sizes[d]);
    }
  }
  std::sort(dims.begin(), dims.end());
  int64_t reached = 0;
  for (const auto& [stride, size] : dims) {
    if (stride <= reached) {
      return true;
    }
    reached += stride * (size - 1);
  }
  return false;
}

}  // namespace

Value forward(const ViewStep& step, const Value& in) {
  return {make_node(*step.op, Args(step.args), {in}, step.out), 0};
}

Value inverse(const ViewStep& step, const Value& base, const Value& v) {
  static auto& real = op_info("aten::view_as_real", "");
  static auto& complex = op_info("aten::view_as_complex", "");
  const auto& in = step.in;
  Args args{input_arg()};
  switch (step.op->inverse) {
    case Inverse::Scatter:
      args.push_back(input_arg());
      args.append(step.args.begin() + 1, step.args.end());
      return apply(*step.op->scatter, {base, v}, std::move(args), in);
    case Inverse::Self:
      args.append(step.args.begin() + 1, step.args.end());
      return apply(*step.op, {v}, std::move(args), in);
    case Inverse::Permute: {
      const auto dims = step.args[1].value.toIntVector();
      std::vector<int64_t> back(dims.size());
      for (size_t i = 0; i < dims.size(); ++i) {
        back[c10::maybe_wrap_dim(dims[i], static_cast<int64_t>(dims.size()))] = static_cast<int64_t>(i);
      }
      args.push_back(attr(back));
      return apply(*step.op, {v}, std::move(args), in);
    }
    case Inverse::Complex:
      return apply(c10::isComplexType(in->dtype) ? complex : real, {v}, std::move(args), in);
    case Inverse::Bitcast:
      args.push_back(attr(static_cast<int64_t>(in->dtype)));
      return apply(*step.op, {v}, std::move(args), in);
    case Inverse::Shape:
      return reshape(v, in);
    case Inverse::Memory:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, step.op->name, " is no step of a view");
}

ViewPath make_step(ViewPath parent, OpInfo& op, Args args, MetaRef in, MetaSetPtr out) {
  auto step = c10::make_intrusive<ViewStep>();
  step->overlaps_itself = (parent.defined() && parent->overlaps_itself) || op.self_overlap == SelfOverlap::Always ||
                          (op.self_overlap == SelfOverlap::WhereLarger && out->metas[0].numel() != in->numel()) ||
                          (op.form == Form::AsStrided && may_overlap_itself(out->metas[0]));
  step->parent = std::move(parent);
  step->op = &op;
  step->args = std::move(args);
  step->in = std::move(in);
  step->out = std::move(out);
  return step;
}

std::pair<Value, MetaRef> without_overlap(Value v, Value old, MetaRef meta) {
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
  const MetaRef in = path.defined() ? MetaRef{path->out, 0} : base;
  return make_step(std::move(path), as_strided,
                   {input_arg(), attr(int_list(meta->sizes)), attr(int_list(meta->strides)), attr(meta->offset)}, in,
                   single(meta));
}

std::vector<const ViewStep*> steps_of(const ViewPath& path) {
  std::vector<const ViewStep*> steps;
  for (auto* s = path.get(); s != nullptr; s = s->parent.get()) {
    steps.push_back(s);
  }
  std::reverse(steps.begin(), steps.end());
  return steps;
}

LazyBits lazy_bits_of(const ViewPath& path) {
  LazyBits bits;
  for (const auto* step = path.get(); step != nullptr; step = step->parent.get()) {
    bits.conjugate = bits.conjugate != (step->op->lazy_bit == LazyBit::Conjugate);
    bits.negative = bits.negative != (step->op->lazy_bit == LazyBit::Negative);
  }
  return bits;
}

ViewPath with_lazy_bits(ViewPath path, const LazyBits& bits, const MetaRef& meta) {
  const auto add = [&](const char* name) {
    path = make_step(std::move(path), op_info(name, ""), {input_arg()}, meta, single(meta));
  };
  if (bits.conjugate) {
    add("aten::_conj");
  }
  if (bits.negative) {
    add("aten::_neg_view");
  }
  return path;
}

bool shows_storage(const ViewPath& path, const Meta& base) {
  const auto& shown = path->out->metas[0];
  return shown.layout == base.layout && shown.offset == base.offset && lazy_bits_of(path) == LazyBits();
}

Value padded(const Value& v, const MetaRef& meta, const MetaRef& grown) {
  static auto& pad = op_info("aten::constant_pad_nd", "");
  const auto path = memory_path(meta, meta->dtype);  // keeps its steps alive
  Value flat = v;
  for (const auto* step : steps_of(path)) {
    flat = forward(*step, flat);
  }
  const std::vector<int64_t> behind{0, grown->sizes[0] - meta->numel()};
  return apply(pad, {std::move(flat)}, {input_arg(), attr(behind), attr(unwritten(meta->dtype))}, grown);
}

}  // namespace torch_xla
