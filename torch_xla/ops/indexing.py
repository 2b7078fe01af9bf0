"""Rules for reading and writing at positions that are data: `index`, `gather`, `scatter`, `embedding` and their kin."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torch_xla.ops import dtypes
from torch_xla.ops.args import along, axis
from torch_xla.ops.registry import Context, lowers

Indices = Sequence[jax.Array | None]

# Along a dimension with at most so many writes, a comparison with every position beats a scatter.
_FEW_WRITES = 4


def _is_mask(index: jax.Array | None) -> bool:
    return index is not None and index.dtype in (np.bool_, np.uint8)


def _subscript(indices: Indices) -> tuple[Any, ...]:
    """A NumPy subscript for PyTorch's list of indices without masks; None is a full slice."""
    return tuple(slice(None) if index is None else index.astype(np.int64) for index in indices)


def _places(x: jax.Array, indices: Indices, count: int | None) -> tuple[Any, ...]:
    """The subscript of a write at indices with masks among them; None stands for a full slice.

    A mask stands for the positions that it selects, an index for each of its dimensions. They broadcast with the other
    indices as the last dimension of these, so a mask may select one position for all. Surplus places are outside the
    array, where a write is dropped. `count` is how many places the values have along that dimension, where they tell.
    """
    masks = [i for i in indices if i is not None and _is_mask(i)]
    lengths = [count, *(i.shape[-1] for i in indices if i is not None and not _is_mask(i) and i.ndim)]
    length = next((n for n in lengths if n not in (None, 1)), None)
    size = max(mask.size for mask in masks) if length is None else length
    hits = [jnp.count_nonzero(mask) for mask in masks]
    number: Any = size
    if length is None:
        number = functools.reduce(lambda a, b: jnp.where(a == 1, b, a), hits)
    inside = jnp.arange(size) < number
    subscript: list[Any] = []
    for index in indices:
        if index is None or not _is_mask(index):
            subscript.extend(_subscript([index]))
            continue
        outside = x.shape[len(subscript) : len(subscript) + index.ndim]
        one = inside & (hits.pop(0) == 1)
        for column in jnp.nonzero(index, size=size, fill_value=outside):
            subscript.append(jnp.where(one, column[:1], column))
    return tuple(subscript)


@lowers("aten.index.Tensor", "aten._unsafe_index.Tensor")
def _index(ctx: Context, x: jax.Array, indices: Indices) -> jax.Array:
    return x.at[_subscript(indices)].get(mode="clip")


@lowers("aten.index_put.default", "aten._unsafe_index_put.default", "aten._index_put_impl.default")
def _index_put(
    ctx: Context, x: jax.Array, indices: Indices, values: jax.Array, accumulate: bool, unsafe: bool = False
) -> jax.Array:
    values = dtypes.cast(values, dtypes.torch_dtype(x.dtype))
    indexed_dims = [(d, i) for d, i in enumerate(indices) if i is not None]
    if not any(_is_mask(i) for _, i in indexed_dims):
        return _write(x, _subscript(indices), values, accumulate)
    if values.size == 0 or x.size == 0:
        return x
    # How many dimensions of the values are behind the places: those behind the indices, or all others where these are
    # apart.
    (first, _), (last, _) = indexed_dims[0], indexed_dims[-1]
    apart = last - first + 1 > len(indexed_dims)
    after = x.ndim - sum(i.ndim if _is_mask(i) else 1 for _, i in indexed_dims) - (0 if apart else first)
    if len(indexed_dims) == 1 and (values.ndim <= after or (values.ndim == after + 1 and values.shape[0] == 1)):
        # One value (or one slice) for all selected positions: a choice between two arrays.
        if values.ndim == after + 1:
            values = jnp.squeeze(values, 0)
        mask = indexed_dims[0][1]
        mask = jnp.reshape(mask, (*mask.shape, *[1] * after)) != 0
        return jnp.where(mask, _add(x, values) if accumulate else values, x)
    count = values.shape[-after - 1] if values.ndim > after else None
    return _write(x, _places(x, indices, count), values, accumulate)


def _write(x: jax.Array, subscript: Any, values: jax.Array, accumulate: bool) -> jax.Array:
    """Stores or adds `values`; positions outside the array are dropped, and booleans add as "or"."""
    target = x.at[subscript]
    if not accumulate:
        return target.set(values, mode="drop")
    return target.max(values, mode="drop") if x.dtype == np.bool_ else target.add(values, mode="drop")


def _add(x: jax.Array, y: jax.Array) -> jax.Array:
    return x | y if x.dtype == np.bool_ else x + y


@lowers("aten._unsafe_masked_index.default")
def _masked_index(ctx: Context, x: jax.Array, mask: jax.Array, indices: Indices, fill: Any) -> jax.Array:
    value = x.at[_subscript(indices)].get(mode="clip")
    return jnp.where(mask, value, dtypes.cast(fill, ctx.meta.dtype))


@lowers("aten.gather.default")
def _gather(ctx: Context, x: jax.Array, dim: int, index: jax.Array, *, sparse_grad: bool) -> jax.Array:
    if x.ndim == 0 or index.ndim == 0 or index.size == 0:
        return jnp.broadcast_to(jnp.reshape(x, (-1,))[0] if index.size else x.sum(), ctx.meta.shape)
    dim = axis(dim, x.ndim)
    # The index may cover only a corner of the other dimensions.
    corner = [n if d == dim else index.shape[d] for d, n in enumerate(x.shape)]
    return jnp.take_along_axis(lax.slice(x, [0] * x.ndim, corner), index, axis=dim, mode="clip")


def _scatter(x: jax.Array, dim: int, index: jax.Array, src: jax.Array | None, value: Any, reduce: str) -> jax.Array:
    """Writes `src` (or the 0-d array `value`) along `dim` at `index`; `reduce` is a method of ``x.at[...]``."""
    if index.size == 0:
        return x
    shape = x.shape
    x, index = jnp.atleast_1d(x), jnp.atleast_1d(index)
    dim = axis(dim, x.ndim)
    if src is not None:
        src = lax.slice(jnp.atleast_1d(src), [0] * x.ndim, index.shape)
        update = dtypes.cast(src, dtypes.torch_dtype(x.dtype))
    else:
        update = jnp.broadcast_to(value, index.shape)
    covers_other_dims = all(index.shape[d] == x.shape[d] for d in range(x.ndim) if d != dim)
    if covers_other_dims and index.shape[dim] <= _FEW_WRITES and reduce in ("set", "add"):
        return jnp.reshape(_scatter_few(x, dim, index, update, reduce), shape)
    grid = [lax.broadcasted_iota(np.int64, index.shape, d) for d in range(x.ndim)]
    grid[dim] = index.astype(np.int64)
    target = x.at[tuple(grid)]
    if x.dtype == np.bool_ and reduce in ("add", "multiply"):
        reduce = "max" if reduce == "add" else "min"
    return jnp.reshape(getattr(target, reduce)(update, mode="drop"), shape)


def _scatter_few(x: jax.Array, dim: int, index: jax.Array, update: jax.Array, reduce: str) -> jax.Array:
    position = along(jnp.arange(x.shape[dim], dtype=index.dtype), dim, x.ndim)
    for i in range(index.shape[dim]):
        hit = position == lax.slice_in_dim(index, i, i + 1, 1, dim)
        new = lax.slice_in_dim(update, i, i + 1, 1, dim)
        x = jnp.where(hit, new if reduce == "set" else _add(x, new), x)
    return x


@lowers("aten.scatter.src", "aten.scatter.reduce")
def _scatter_src(
    ctx: Context, x: jax.Array, dim: int, index: jax.Array, src: jax.Array, *, reduce: str = "set"
) -> jax.Array:
    return _scatter(x, dim, index, src, None, reduce)


@lowers("aten.scatter.value", "aten.scatter.value_reduce")
def _scatter_value(
    ctx: Context, x: jax.Array, dim: int, index: jax.Array, value: Any, *, reduce: str = "set"
) -> jax.Array:
    return _scatter(x, dim, index, None, dtypes.cast(value, ctx.meta.dtype), reduce)


@lowers("aten.scatter_add.default")
def _scatter_add(ctx: Context, x: jax.Array, dim: int, index: jax.Array, src: jax.Array) -> jax.Array:
    return _scatter(x, dim, index, src, None, "add")


_REDUCTIONS = {"sum": "add", "mean": "add", "prod": "multiply", "amax": "max", "amin": "min"}


def _identity_of(reduce: str, dtype: Any) -> Any:
    if reduce in ("sum", "mean"):
        return 0
    if reduce == "prod":
        return 1
    if dtype == np.bool_:
        return reduce == "amin"
    if jnp.issubdtype(dtype, jnp.integer):
        limits = jnp.iinfo(dtype)
        return limits.min if reduce == "amax" else limits.max
    return -np.inf if reduce == "amax" else np.inf


def _scatter_reduce_into(
    x: jax.Array, dim: int, index: jax.Array, src: jax.Array, reduce: str, include_self: bool
) -> jax.Array:
    if index.size == 0:
        return x
    one = jnp.ones((), np.int32)
    counts = None
    if reduce == "mean" or not include_self:
        counts = _scatter(jnp.zeros(x.shape, np.int32), dim, index, None, one, "add")
    start = x
    if not include_self:
        assert counts is not None
        start = jnp.where(counts > 0, jnp.asarray(_identity_of(reduce, x.dtype), x.dtype), x)
    out = _scatter(start, dim, index, src, None, _REDUCTIONS[reduce])
    if reduce != "mean":
        return out
    assert counts is not None
    counts = jnp.maximum(counts + 1 if include_self else counts, 1)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.floor_divide(out, counts.astype(x.dtype))
    return out / counts.astype(x.dtype)


@lowers("aten.scatter_reduce.two")
def _scatter_reduce(
    ctx: Context, x: jax.Array, dim: int, index: jax.Array, src: jax.Array, reduce: str, *, include_self: bool
) -> jax.Array:
    return _scatter_reduce_into(x, dim, index, src, reduce, include_self)


def _rows(x: jax.Array, dim: int, index: jax.Array) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    """Subscript of whole slices along `dim`, and the shape of what is written there."""
    index = jnp.reshape(index, (-1,))
    subscript = (slice(None),) * dim + (index.astype(np.int64),)
    return subscript, (*x.shape[:dim], index.shape[0], *x.shape[dim + 1 :])


@lowers("aten.index_reduce.default")
def _index_reduce(
    ctx: Context, x: jax.Array, dim: int, index: jax.Array, source: jax.Array, reduce: str, *, include_self: bool
) -> jax.Array:
    flat = jnp.atleast_1d(x)
    dim = axis(dim, flat.ndim)
    _, shape = _rows(flat, dim, index)
    wide = jnp.broadcast_to(along(jnp.reshape(index, (-1,)), dim, flat.ndim), shape)
    out = _scatter_reduce_into(flat, dim, wide, jnp.reshape(source, shape), reduce, include_self)
    return jnp.reshape(out, x.shape)


@lowers("aten.take.default")
def _take(ctx: Context, x: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.reshape(x, (-1,)).at[index].get(mode="clip") if index.size else jnp.zeros(index.shape, x.dtype)


@lowers("aten.put.default")
def _put(ctx: Context, x: jax.Array, index: jax.Array, source: jax.Array, accumulate: bool) -> jax.Array:
    flat = jnp.reshape(x, (-1,))
    return jnp.reshape(_write(flat, index, jnp.reshape(source, index.shape), accumulate), x.shape)


@lowers("aten.masked_scatter.default")
def _masked_scatter(ctx: Context, x: jax.Array, mask: jax.Array, source: jax.Array) -> jax.Array:
    if source.size == 0:
        return jnp.broadcast_to(x, ctx.meta.shape)
    mask, x = jnp.broadcast_to(mask, ctx.meta.shape), jnp.broadcast_to(x, ctx.meta.shape)
    order = jnp.cumsum(jnp.reshape(mask, (-1,)), dtype=np.int64) - 1
    values = jnp.take(jnp.reshape(source, (-1,)), jnp.reshape(order, mask.shape), mode="clip")
    return jnp.where(mask, values, x)


@lowers("aten.masked_scatter_backward.default")
def _masked_scatter_backward(ctx: Context, grad: jax.Array, mask: jax.Array, sizes: Sequence[int]) -> jax.Array:
    count = int(np.prod(sizes, dtype=np.int64))
    flat_mask = jnp.reshape(jnp.broadcast_to(mask, grad.shape), (-1,))
    slot = jnp.where(flat_mask, jnp.cumsum(flat_mask, dtype=np.int64) - 1, count)
    out = jnp.zeros((count,), grad.dtype).at[slot].set(jnp.reshape(grad, (-1,)), mode="drop")
    return jnp.reshape(out, tuple(sizes))


@lowers("aten.nonzero_static.default")
def _nonzero_static(ctx: Context, x: jax.Array, *, size: int, fill_value: int) -> jax.Array:
    if x.ndim == 0:
        return jnp.zeros(ctx.meta.shape, np.int64)
    return jnp.stack(jnp.nonzero(x, size=size, fill_value=fill_value), axis=1)


@lowers("aten.embedding.default")
def _embedding(
    ctx: Context, weight: jax.Array, indices: jax.Array, padding_idx: int, scale_grad_by_freq: bool, sparse: bool
) -> jax.Array:
    return jnp.take(weight, indices, axis=0, mode="clip")


@lowers("aten.embedding_dense_backward.default")
def _embedding_backward(
    ctx: Context,
    grad: jax.Array,
    indices: jax.Array,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> jax.Array:
    width = grad.shape[indices.ndim :]
    rows = dtypes.widen(jnp.reshape(grad, (-1, *width)))
    flat = jnp.reshape(indices, (-1,)).astype(np.int64)
    if scale_grad_by_freq:
        counts = jnp.zeros((num_weights,), rows.dtype).at[flat].add(1, mode="drop")
        rows = rows / jnp.maximum(jnp.take(counts, flat, mode="clip"), 1)[:, None]
    # Rows of the padding index go outside the array, where writes are dropped; JAX cuts indices to 32 bits.
    written = (flat >= 0) & (flat < num_weights) & (flat != padding_idx)
    flat = jnp.where(written, flat, num_weights)
    return jnp.zeros((num_weights, *width), rows.dtype).at[flat].add(rows, mode="drop")
