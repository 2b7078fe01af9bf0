"""Rules for operators that only move elements: views, their copies, joins, splits, and writes into views.

Arrays are logical here: a view is lowered as the values it shows. The one exception is ``as_strided``, whose input is
the flat storage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torch_xla.ops import dtypes, host_kernel
from torch_xla.ops.args import axes, axis, clamp_slice, ints
from torch_xla.ops.registry import Context, NumberInput, array_of, lowers

Arrays = tuple[jax.Array, ...]
Offset = int | NumberInput | None


@lowers(
    "aten.view.default",
    "aten.view_copy.default",
    "aten._unsafe_view.default",
    "aten._reshape_alias.default",
    "aten._reshape_alias_copy.default",
    "aten._reshape_copy.default",
    "aten.reshape.default",
    "aten.unsqueeze.default",
    "aten.unsqueeze_copy.default",
    "aten.squeeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten.squeeze_copy.default",
    "aten.squeeze_copy.dim",
    "aten.squeeze_copy.dims",
)
def _reshape(ctx: Context, x: jax.Array, *_: Any) -> jax.Array:
    return lax.reshape(x, ctx.meta.shape)


@lowers(
    "aten.alias.default",
    "aten.alias_copy.default",
    "aten.detach.default",
    "aten.detach_copy.default",
    "aten.lift.default",
    "aten.lift_fresh.default",
    "aten.lift_fresh_copy.default",
)
def _identity(ctx: Context, x: jax.Array) -> jax.Array:
    return x


@lowers("aten.expand.default", "aten.expand_copy.default")
def _expand(ctx: Context, x: jax.Array, size: Sequence[int], *, implicit: bool = False) -> jax.Array:
    return jnp.broadcast_to(x, ctx.meta.shape)


@lowers("aten.permute.default", "aten.permute_copy.default")
def _permute(ctx: Context, x: jax.Array, dims: Sequence[int]) -> jax.Array:
    return lax.transpose(x, axes(dims, x.ndim))


@lowers("aten.transpose.int", "aten.transpose_copy.int")
def _transpose(ctx: Context, x: jax.Array, dim0: int, dim1: int) -> jax.Array:
    order = list(range(x.ndim))
    if order:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return lax.transpose(x, order)


@lowers("aten.t.default", "aten.t_copy.default")
def _t(ctx: Context, x: jax.Array) -> jax.Array:
    return x.T


@lowers("aten.select.int", "aten.select_copy.int")
def _select(ctx: Context, x: jax.Array, dim: int, index: int | NumberInput) -> jax.Array:
    if isinstance(index, NumberInput):
        return lax.dynamic_index_in_dim(x, index.value, axis(dim, x.ndim), keepdims=False)
    return lax.index_in_dim(x, index, axis(dim, x.ndim), keepdims=False)


@lowers("aten.slice.Tensor", "aten.slice_copy.Tensor")
def _slice(ctx: Context, x: jax.Array, dim: int, start: Offset, end: Offset, step: int) -> jax.Array:
    dim = axis(dim, x.ndim)
    # What its end is, its shape tells.
    reach = _reach(ctx.meta.shape[dim], step)
    if isinstance(start, NumberInput):
        return lax.slice_in_dim(lax.dynamic_slice_in_dim(x, start.value, reach, dim), 0, None, step, dim)
    first, _ = clamp_slice(start, None, x.shape[dim])
    return lax.slice_in_dim(x, first, first + reach, step, dim)


def _reach(count: int, step: int) -> int:
    """The length that `count` elements span, one in `step`."""
    return max((count - 1) * step + 1, 0)


def _pieces(x: jax.Array, sizes: Sequence[int], dim: int) -> Arrays:
    bounds = np.cumsum([0, *sizes]).tolist()
    return tuple(lax.slice_in_dim(x, a, b, 1, dim) for a, b in zip(bounds[:-1], bounds[1:], strict=True))


@lowers("aten.split.Tensor", "aten.split_copy.Tensor", "aten.unsafe_split.Tensor", "aten.chunk.default")
def _split(ctx: Context, x: jax.Array, size: int, dim: int) -> Arrays:
    dim = axis(dim, x.ndim)
    return _pieces(x, [meta.shape[dim] for meta in ctx.out if meta is not None], dim)


@lowers("aten.split_with_sizes.default", "aten.split_with_sizes_copy.default", "aten.unsafe_split_with_sizes.default")
def _split_with_sizes(ctx: Context, x: jax.Array, sizes: Sequence[int], dim: int) -> Arrays:
    return _pieces(x, sizes, axis(dim, x.ndim))


@lowers("aten.unbind.int", "aten.unbind_copy.int")
def _unbind(ctx: Context, x: jax.Array, dim: int) -> Arrays:
    dim = axis(dim, x.ndim)
    return tuple(lax.index_in_dim(x, i, dim, keepdims=False) for i in range(x.shape[dim]))


@lowers("aten.diagonal.default", "aten.diagonal_copy.default")
def _diagonal(ctx: Context, x: jax.Array, offset: int, dim1: int, dim2: int) -> jax.Array:
    x = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    rows, columns = _diagonal_index(x.shape, offset)
    return x[..., rows, columns]


def _diagonal_index(shape: Sequence[int], offset: int) -> tuple[np.ndarray, np.ndarray]:
    first_row, first_column = max(-offset, 0), max(offset, 0)
    length = max(min(shape[-2] - first_row, shape[-1] - first_column), 0)
    return np.arange(length) + first_row, np.arange(length) + first_column


@lowers("aten.unfold.default", "aten.unfold_copy.default")
def _unfold(ctx: Context, x: jax.Array, dim: int, size: int, step: int) -> jax.Array:
    if x.ndim == 0:
        return jnp.reshape(x, (1,))[:size]
    dim = axis(dim, x.ndim)
    count = (x.shape[dim] - size) // step + 1
    if step == size:
        x = lax.slice_in_dim(x, 0, count * size, 1, dim)
        x = jnp.reshape(x, (*x.shape[:dim], count, size, *x.shape[dim + 1 :]))
    else:
        index = np.arange(count)[:, None] * step + np.arange(size)
        x = jnp.take(x, index, axis=dim)
    return jnp.moveaxis(x, dim + 1, -1)


def _strided_index(size: Sequence[int], stride: Sequence[int], offset: int) -> jax.Array:
    index = jnp.asarray(offset, jnp.int64)
    for d, (n, s) in enumerate(zip(size, stride, strict=True)):
        index = index + lax.broadcasted_iota(jnp.int64, tuple(n if i == d else 1 for i in range(len(size))), d) * s
    return jnp.broadcast_to(index, tuple(size))


def _nested_dims(size: Sequence[int], stride: Sequence[int]) -> list[int] | None:
    """Dimensions from the largest stride to the smallest, if each stride is a whole multiple of the next extent's."""
    order = sorted((d for d in range(len(size)) if size[d] != 1), key=lambda d: -stride[d])
    if any(stride[d] <= 0 for d in order):
        return None
    for outer, inner in zip(order[:-1], order[1:], strict=True):
        if stride[outer] % stride[inner] or stride[outer] < size[inner] * stride[inner]:
            return None
    return order


@lowers("aten.as_strided.default", "aten.as_strided_copy.default")
def _as_strided(
    ctx: Context, x: jax.Array, size: Sequence[int], stride: Sequence[int], offset: int | None
) -> jax.Array:
    offset = offset or 0
    flat = jnp.reshape(x, (-1,))
    inner_dims = [d for d in range(len(size)) if stride[d] != 0 or size[d] == 1]
    inner_size, inner_stride = [size[d] for d in inner_dims], [stride[d] for d in inner_dims]
    order = _nested_dims(inner_size, inner_stride)
    if math.prod(size) == 0:
        return jnp.zeros(tuple(size), x.dtype)
    if order is None:
        return jnp.take(flat, _strided_index(size, stride, offset), mode="clip")
    value = _nested_slice(flat, [inner_size[d] for d in order], [inner_stride[d] for d in order], offset)
    value = jnp.transpose(value, [order.index(d) for d in sorted(order)])
    value = jnp.reshape(value, [size[d] if d in inner_dims else 1 for d in range(len(size))])
    return jnp.broadcast_to(value, tuple(size))


def _nested_slice(flat: jax.Array, size: list[int], stride: list[int], offset: int) -> jax.Array:
    """Reads nested strides with reshapes and slices, which XLA fuses, instead of a gather."""
    if not size:
        return flat[offset]
    length = size[0] * stride[0]
    piece = lax.slice_in_dim(flat, offset, min(offset + length, flat.shape[0]))
    piece = jnp.pad(piece, (0, length - piece.shape[0]))
    extents = [size[0], *(a // b for a, b in zip(stride[:-1], stride[1:], strict=True)), stride[-1]]
    return lax.slice(jnp.reshape(piece, extents), [0] * len(extents), [*size, 1])[..., 0]


@lowers("aten.as_strided_scatter.default")
def _as_strided_scatter(
    ctx: Context, x: jax.Array, src: jax.Array, size: Sequence[int], stride: Sequence[int], offset: int | None
) -> jax.Array:
    offset = offset or 0
    flat = jnp.reshape(x, (-1,))
    src = src.astype(x.dtype)
    contiguous = math.prod(size) > 0
    expected = 1
    for n, s in zip(reversed(size), reversed(stride), strict=True):
        contiguous = contiguous and (n == 1 or s == expected)
        expected *= n
    if contiguous:
        flat = _replace(flat, jnp.reshape(src, (-1,)), offset, 0)
    else:
        flat = flat.at[_strided_index(size, stride, offset)].set(src)
    return jnp.reshape(flat, x.shape)


def _replace(x: jax.Array, src: jax.Array, start: int | jax.Array, dim: int) -> jax.Array:
    # XLA:CPU fuses what is written with the write, which it does in place: `x[:3] = x[:3].flip(0)` then reads rows that
    # are new already. Values that are there before the write starts are safe.
    src = lax.platform_dependent(src, cpu=lax.optimization_barrier, default=lambda values: values)
    return lax.dynamic_update_slice_in_dim(x, src, start, dim)


def write_slice(x: jax.Array, src: jax.Array, dim: int, start: int, end: int, step: int) -> jax.Array:
    """`x` with ``x[start:end:step]`` along `dim` replaced by `src`; the bounds are clamped already."""
    src = jnp.broadcast_to(src.astype(x.dtype), (*x.shape[:dim], len(range(start, end, step)), *x.shape[dim + 1 :]))
    if src.size == 0:
        return x
    if step == 1:
        return src if src.shape == x.shape else _replace(x, src, start, dim)
    spread = _spread(src, dim, start, step, x.shape[dim])
    position = np.arange(x.shape[dim])
    hit = (position >= start) & (position < end) & ((position - start) % step == 0)
    return jnp.where(hit.reshape([-1 if d == dim else 1 for d in range(x.ndim)]), spread, x)


def _write_at(x: jax.Array, src: jax.Array, dim: int, start: jax.Array, step: int) -> jax.Array:
    """`x` with every `step`-th place from `start` along `dim` replaced by `src`; one below zero counts from the end."""
    if src.size == 0:
        return x
    src = src.astype(x.dtype)
    if step != 1:
        reach = _reach(src.shape[dim], step)
        src = write_slice(lax.dynamic_slice_in_dim(x, start, reach, dim), src, dim, 0, reach, step)
    return _replace(x, src, start, dim)


def _spread(src: jax.Array, dim: int, start: int, step: int, size: int) -> jax.Array:
    """`src` at every `step`-th position from `start` of a zero array of `size` along `dim`."""
    used = start + max(src.shape[dim] - 1, 0) * step + (1 if src.shape[dim] else 0)
    config = [(0, 0, 0)] * src.ndim
    config[dim] = (start, size - used, step - 1)
    return lax.pad(src, jnp.zeros((), src.dtype), config)


@lowers("aten.slice_scatter.default")
def _slice_scatter(
    ctx: Context, x: jax.Array, src: jax.Array, dim: int, start: Offset, end: Offset, step: int
) -> jax.Array:
    dim = axis(dim, x.ndim)
    if isinstance(start, NumberInput):
        return _write_at(x, src, dim, start.value, step)
    if isinstance(end, NumberInput):  # for a view, whose shape `src` has
        start, _ = clamp_slice(start, None, x.shape[dim])
        end = start + _reach(src.shape[dim], step)
    return write_slice(x, src, dim, *clamp_slice(start, end, x.shape[dim]), step)


@lowers("aten.select_scatter.default")
def _select_scatter(ctx: Context, x: jax.Array, src: jax.Array, dim: int, index: int | NumberInput) -> jax.Array:
    dim = axis(dim, x.ndim)
    if isinstance(index, NumberInput):
        return _write_at(x, jnp.expand_dims(src, dim), dim, index.value, 1)
    index %= x.shape[dim]
    return write_slice(x, jnp.expand_dims(src, dim), dim, index, index + 1, 1)


@lowers("aten.diagonal_scatter.default")
def _diagonal_scatter(ctx: Context, x: jax.Array, src: jax.Array, offset: int, dim1: int, dim2: int) -> jax.Array:
    moved = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    rows, columns = _diagonal_index(moved.shape, offset)
    moved = moved.at[..., rows, columns].set(src.astype(x.dtype))
    return jnp.moveaxis(moved, (-2, -1), (dim1, dim2))


@lowers("aten.slice_backward.default")
def _slice_backward(
    ctx: Context,
    grad: jax.Array,
    sizes: Sequence[int],
    dim: int,
    start: int | NumberInput,
    end: int | NumberInput,
    step: int,
) -> jax.Array:
    dim = axis(dim, len(sizes))
    if isinstance(start, NumberInput):
        return _write_at(jnp.zeros(sizes, grad.dtype), grad, dim, start.value, step)
    start, _ = clamp_slice(start, None, sizes[dim])
    return _spread(grad, dim, start, step, sizes[dim])


@lowers("aten.select_backward.default")
def _select_backward(
    ctx: Context, grad: jax.Array, sizes: Sequence[int], dim: int, index: int | NumberInput
) -> jax.Array:
    dim = axis(dim, len(sizes))
    if isinstance(index, NumberInput):
        return _write_at(jnp.zeros(sizes, grad.dtype), jnp.expand_dims(grad, dim), dim, index.value, 1)
    return _spread(jnp.expand_dims(grad, dim), dim, index % sizes[dim], 1, sizes[dim])


@lowers("aten.view.dtype", "aten.view_copy.dtype")
def _view_dtype(ctx: Context, x: jax.Array, dtype: torch.dtype) -> jax.Array:
    if x.dtype == np.bool_:
        x = x.astype(np.uint8)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = _view_as_real(ctx, x)
        x = jnp.reshape(x, (*x.shape[:-2], -1)) if x.ndim > 1 else x
    target = dtypes.numpy_dtype(dtype)
    if jnp.issubdtype(target, jnp.complexfloating):
        part = dtypes.numpy_dtype(torch.float32 if dtype == torch.complex64 else torch.float64)
        x = _bitcast(x, part)
        return _view_as_complex(ctx, jnp.reshape(x, (*x.shape[:-1], -1, 2)))
    if target == np.bool_:
        return _bitcast(x, np.dtype(np.uint8)) != 0
    return _bitcast(x, target)


def _bitcast(x: jax.Array, target: np.dtype) -> jax.Array:
    ratio = target.itemsize / x.dtype.itemsize
    if ratio > 1:
        x = jnp.reshape(x, (*x.shape[:-1], -1, int(ratio)))
    x = lax.bitcast_convert_type(x, target)
    return jnp.reshape(x, (*x.shape[:-2], -1)) if ratio < 1 and x.ndim > 1 else x


@lowers("aten.view_as_real.default", "aten.view_as_real_copy.default")
def _view_as_real(ctx: Context, x: jax.Array) -> jax.Array:
    return jnp.stack([x.real, x.imag], axis=-1)


@lowers("aten.view_as_complex.default", "aten.view_as_complex_copy.default")
def _view_as_complex(ctx: Context, x: jax.Array) -> jax.Array:
    return lax.complex(x[..., 0], x[..., 1])


@lowers("aten._conj.default", "aten._conj_copy.default", "aten._conj_physical.default", "aten.conj_physical.default")
def _conj(ctx: Context, x: jax.Array) -> jax.Array:
    return jnp.conj(x)


@lowers("aten._neg_view.default", "aten._neg_view_copy.default")
def _neg_view(ctx: Context, x: jax.Array) -> jax.Array:
    return -x


@lowers("aten.cat.default")
def _cat(ctx: Context, tensors: Sequence[jax.Array], dim: int) -> jax.Array:
    # PyTorch lets tensors of shape [0] join anything.
    parts = [dtypes.cast(t, ctx.meta.dtype) for t in tensors if t.shape != (0,)]
    if not parts:
        return jnp.zeros(ctx.meta.shape, dtypes.numpy_dtype(ctx.meta.dtype))
    return parts[0] if len(parts) == 1 else lax.concatenate(parts, axis(dim, parts[0].ndim))


@lowers("aten.stack.default")
def _stack(ctx: Context, tensors: Sequence[jax.Array], dim: int) -> jax.Array:
    return jnp.stack([dtypes.cast(t, ctx.meta.dtype) for t in tensors], axis=axis(dim, tensors[0].ndim + 1))


@lowers("aten.repeat.default")
def _repeat(ctx: Context, x: jax.Array, repeats: Sequence[int]) -> jax.Array:
    return jnp.tile(x, tuple(repeats))


@lowers("aten.flip.default")
def _flip(ctx: Context, x: jax.Array, dims: Sequence[int]) -> jax.Array:
    return lax.rev(x, axes(dims, x.ndim)) if x.ndim else x


@lowers("aten.roll.default")
def _roll(ctx: Context, x: jax.Array, shifts: Sequence[int], dims: Sequence[int]) -> jax.Array:
    if x.size == 0:
        return x
    if not dims:
        return jnp.reshape(jnp.roll(jnp.reshape(x, (-1,)), array_of(ints(shifts, 1)[0])), x.shape)
    for shift, dim in zip(ints(shifts, 1), axes(dims, x.ndim), strict=True):
        x = jnp.roll(x, array_of(shift), dim) if x.ndim else x
    return host_kernel.once(x)  # of a chain of stencils XLA makes fusions that compute each step anew at each place


def _triangle(x: jax.Array, diagonal: int | NumberInput, lower: bool) -> jax.Array:
    rows = lax.broadcasted_iota(jnp.int32, x.shape[-2:], 0)
    columns = lax.broadcasted_iota(jnp.int32, x.shape[-2:], 1)
    # Diagonals far outside the matrix would not fit int32.
    offset = diagonal.value if isinstance(diagonal, NumberInput) else diagonal
    offset = jnp.clip(offset, -x.shape[-2] - 1, x.shape[-1] + 1).astype(jnp.int32)
    keep = columns - rows <= offset if lower else columns - rows >= offset
    return jnp.where(keep, x, jnp.zeros((), x.dtype))


@lowers("aten.tril.default")
def _tril(ctx: Context, x: jax.Array, diagonal: int | NumberInput) -> jax.Array:
    return _triangle(x, diagonal, lower=True)


@lowers("aten.triu.default")
def _triu(ctx: Context, x: jax.Array, diagonal: int | NumberInput) -> jax.Array:
    return _triangle(x, diagonal, lower=False)


@lowers("aten.repeat_interleave.Tensor")
def _repeat_interleave_index(ctx: Context, repeats: jax.Array, *, output_size: int | None) -> jax.Array:
    return jnp.repeat(jnp.arange(repeats.shape[0]), repeats, total_repeat_length=ctx.meta.shape[0])
