"""Sorting, selection by rank, and search in sorted sequences."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from torch_xla.ops import dtypes
from torch_xla.ops.registry import Context, array_of, lowers


@lowers("aten.sort.default", "aten.sort.stable")
def _sort(
    ctx: Context, x: jax.Array, dim: int, descending: bool, stable: bool | None = None
) -> tuple[jax.Array, jax.Array]:
    """Stable sort with the places the values came from; NaN counts as the largest value."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    keys = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    places = lax.broadcasted_iota(jnp.int64, x.shape, dim)
    if descending:
        # Reversed before and after, so that equal values keep their order.
        keys, places = lax.rev(keys, (dim,)), lax.rev(places, (dim,))
    keys, places = lax.sort((keys, places), dimension=dim, is_stable=True, num_keys=1)
    if descending:
        keys, places = lax.rev(keys, (dim,)), lax.rev(places, (dim,))
    return keys.astype(x.dtype), places


@lowers("aten.topk.default")
def _topk(ctx: Context, x: jax.Array, k: int, dim: int, largest: bool, sorted: bool) -> tuple[jax.Array, jax.Array]:
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    if largest and x.dtype in (jnp.float32, jnp.bfloat16, jnp.float16) and 0 < k < x.shape[dim]:
        values, places = lax.top_k(jnp.moveaxis(x, dim, -1), k)
        return jnp.moveaxis(values, -1, dim), jnp.moveaxis(places, -1, dim)
    values, places = _sort(ctx, x, dim, largest)
    return lax.slice_in_dim(values, 0, k, axis=dim), lax.slice_in_dim(places, 0, k, axis=dim)


# One value per row.


def _at(x: jax.Array, places: jax.Array, dim: int, keepdim: bool) -> jax.Array:
    selected = jnp.take_along_axis(x, places, axis=dim)
    return selected if keepdim else jnp.squeeze(selected, dim)


def _ranked(ctx: Context, x: jax.Array, rank: jax.Array, dim: int, keepdim: bool) -> tuple[jax.Array, jax.Array]:
    """Value and place at a rank, which has size 1 in `dim`."""
    values, places = _sort(ctx, x, dim, False)
    return _at(values, rank, dim, keepdim), _at(places, rank, dim, keepdim)


def _row_shape(x: jax.Array, dim: int) -> tuple[int, ...]:
    return tuple(1 if d == dim else size for d, size in enumerate(x.shape))


@lowers("aten.kthvalue.default")
def _kthvalue(ctx: Context, x: jax.Array, k: int, dim: int, keepdim: bool) -> tuple[jax.Array, jax.Array]:
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    return _ranked(ctx, x, jnp.full(_row_shape(x, dim), array_of(k - 1), jnp.int64), dim, keepdim)


@lowers("aten.median.dim", "aten.nanmedian.dim")
def _median(ctx: Context, x: jax.Array, dim: int, keepdim: bool) -> tuple[jax.Array, jax.Array]:
    """The lower median. NaN sorts last: skipped ones shorten the row, others are the answer."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    numbers = jnp.sum(x == x, axis=dim, keepdims=True, dtype=jnp.int64)
    middle = lax.max((numbers - 1) // 2, jnp.zeros_like(numbers))
    if not ctx.op.startswith("aten.nanmedian"):
        is_nan_free = numbers == x.shape[dim]
        middle = jnp.where(is_nan_free, middle, numbers)
    return _ranked(ctx, x, middle, dim, keepdim)


@lowers("aten.median.default", "aten.nanmedian.default")
def _median_of_all(ctx: Context, x: jax.Array) -> jax.Array:
    if x.size == 0:
        empty = jnp.nan if dtypes.is_floating(x) else jnp.iinfo(x.dtype).min
        return jnp.asarray(empty, x.dtype)
    return _median(ctx, x.reshape(-1), 0, False)[0]


@lowers("aten.mode.default")
def _mode(ctx: Context, x: jax.Array, dim: int, keepdim: bool) -> tuple[jax.Array, jax.Array]:
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    values, places = _sort(ctx, x, dim, False)
    ranks = lax.broadcasted_iota(jnp.int64, x.shape, dim)
    previous = jnp.roll(values, 1, axis=dim)
    starts = jnp.where((values != previous) | (ranks == 0), ranks, jnp.zeros_like(ranks))
    run = ranks - lax.cummax(starts, axis=dim)
    # The first longest run holds the smallest of the most frequent values, its end their last place.
    best = jnp.expand_dims(lax.argmax(run, dim, jnp.int64), dim)
    return _at(values, best, dim, keepdim), _at(places, best, dim, keepdim)


# Search.


def _search(sequence: jax.Array, values: jax.Array, right: bool) -> jax.Array:
    """PyTorch's binary search, step by step: it ends at the same place also in what is not sorted, or has NaN."""
    dtype = dtypes.result_type(sequence, values)
    sequence, values = dtypes.cast(sequence, dtype), dtypes.cast(values, dtype)
    size = sequence.shape[-1]
    if size == 0 or values.size == 0:
        return jnp.zeros(values.shape, jnp.int64)
    rows = sequence.reshape(-1, size)
    queries = values.reshape(rows.shape[0], -1)

    def halve(_: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low + high) // 2
        pivots = jnp.take_along_axis(rows, jnp.minimum(middle, size - 1), axis=1, mode="clip")
        beyond = ~(pivots > queries) if right else ~(pivots >= queries)
        searched = low < high
        return jnp.where(searched & beyond, middle + 1, low), jnp.where(searched & ~beyond, middle, high)

    ends = jnp.zeros(queries.shape, jnp.int64), jnp.full(queries.shape, size, jnp.int64)
    return jax.lax.fori_loop(0, size.bit_length(), halve, ends)[0].reshape(values.shape)


@lowers("aten.searchsorted.Tensor", "aten.searchsorted.Scalar")
def _searchsorted(
    ctx: Context, sequence: jax.Array, values: Any, *, out_int32: bool, right: bool, side: str | None, sorter: Any
) -> jax.Array:
    if sorter is not None:
        sequence = jnp.take_along_axis(sequence, sorter, axis=-1)
    if dtypes.is_number(values):
        values = dtypes.cast(values, dtypes.result_type(sequence, values))
    return _search(sequence, values, right if side is None else side == "right")


@lowers("aten.bucketize.Tensor", "aten.bucketize.Scalar")
def _bucketize(ctx: Context, values: Any, boundaries: jax.Array, *, out_int32: bool, right: bool) -> jax.Array:
    return _searchsorted(ctx, boundaries, values, out_int32=out_int32, right=right, side=None, sorter=None)


@lowers("aten.histc.default")
def _histc(ctx: Context, x: jax.Array, bins: int, low: Any, high: Any) -> jax.Array:
    x = x.reshape(-1)
    low, high = (dtypes.cast(v, dtypes.dtype_of(x)) for v in (low, high))
    if x.size:
        automatic = low == high
        low, high = jnp.where(automatic, jnp.min(x), low), jnp.where(automatic, jnp.max(x), high)
    flat = low == high
    low, high = jnp.where(flat, low - 1, low), jnp.where(flat, high + 1, high)
    if not dtypes.is_floating(x):
        places = (x - low).astype(jnp.int64) * bins // (high - low).astype(jnp.int64)
    else:
        places = ((x - low) * bins / (high - low)).astype(jnp.int64)
    places = jnp.minimum(places, bins - 1)
    inside = (x >= low) & (x <= high)
    return jnp.zeros(bins, x.dtype).at[jnp.where(inside, places, bins)].add(1, mode="drop")
