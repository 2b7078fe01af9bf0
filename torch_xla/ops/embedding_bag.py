"""Rules for `embedding_bag`: sums, means and maxima over ragged groups of embedding rows, and their gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from torch_xla.ops import dtypes
from torch_xla.ops.division import divide
from torch_xla.ops.registry import Context, lowers

_SUM, _MEAN, _MAX = range(3)
MaybeArray = jax.Array | None


def _bag_of(offsets: jax.Array, count: int, bags: int) -> jax.Array:
    """The bag of each of `count` indices; int64 [count]."""
    position = jnp.arange(count, dtype=np.int64)
    return jnp.searchsorted(offsets[:bags].astype(np.int64), position, side="right").astype(np.int64) - 1


def _counted(indices: jax.Array, padding_idx: int) -> jax.Array:
    """Which indices take part; the padding index does not."""
    return indices != padding_idx if padding_idx >= 0 else jnp.ones(indices.shape, bool)


@lowers("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")
def _embedding_bag(
    ctx: Context,
    weight: jax.Array,
    indices: jax.Array,
    offsets: jax.Array,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: MaybeArray,
    include_last_offset: bool,
    padding_idx: int,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    bags = ctx.meta.shape[0]
    bag = _bag_of(offsets, indices.shape[0], bags)
    counted = _counted(indices, padding_idx)
    rows = dtypes.widen(jnp.take(weight, indices, axis=0, mode="clip"))
    sizes = jnp.zeros((bags,), np.int64).at[bag].add(counted.astype(np.int64), mode="drop")
    if per_sample_weights is not None:
        rows = rows * dtypes.widen(per_sample_weights)[:, None]
    winners = jnp.zeros((bags, weight.shape[1]), np.int64)
    if mode == _MAX:
        out, winners = _maxima(rows, indices, bag, counted, bags)
    else:
        rows = jnp.where(counted[:, None], rows, jnp.zeros((), rows.dtype))
        out = jnp.zeros((bags, weight.shape[1]), rows.dtype).at[bag].add(rows, mode="drop")
        if mode == _MEAN:
            out = out / jnp.maximum(sizes, 1)[:, None].astype(out.dtype)
    return out, _fit(ctx, 1, bag), _fit(ctx, 2, sizes), _fit(ctx, 3, winners)


def _fit(ctx: Context, result: int, x: jax.Array) -> jax.Array:
    """An intermediate result in the Meta kernel's shape; empty or longer where PyTorch does not read it."""
    meta = ctx.out[result]
    if meta is None or meta.shape == x.shape:
        return x
    if len(meta.shape) == 1 and x.ndim == 1 and meta.shape[0] > x.shape[0]:
        return jnp.pad(x, (0, meta.shape[0] - x.shape[0]))
    return jnp.zeros(meta.shape, x.dtype)


def _maxima(
    rows: jax.Array, indices: jax.Array, bag: jax.Array, counted: jax.Array, bags: int
) -> tuple[jax.Array, jax.Array]:
    """Maximum of each bag and column (0 in an empty bag), and the embedding row it came from (-1 if none)."""
    lowest = jnp.full((bags, rows.shape[1]), -jnp.inf, rows.dtype)
    candidates = jnp.where(counted[:, None], rows, -jnp.inf)
    best = lowest.at[bag].max(candidates, mode="drop")
    # The first index that reaches the maximum owns it.
    reached = counted[:, None] & (candidates == jnp.take(best, bag, axis=0, mode="clip"))
    last = rows.shape[0]
    order = jnp.where(reached, jnp.arange(last, dtype=np.int64)[:, None], last)
    first = jnp.full(best.shape, last, np.int64).at[bag].min(order, mode="drop")
    has_maximum = first < last
    if last == 0:
        return jnp.zeros_like(best), jnp.full(best.shape, -1, np.int64)
    owner = jnp.take(indices, jnp.minimum(first, last - 1), mode="clip").astype(np.int64)
    return jnp.where(has_maximum, best, 0), jnp.where(has_maximum, owner, -1)


@lowers("aten._embedding_bag_dense_backward.default")
def _dense_backward(
    ctx: Context,
    grad: jax.Array,
    indices: jax.Array,
    offset2bag: jax.Array,
    bag_size: jax.Array,
    maximum_indices: jax.Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    per_sample_weights: MaybeArray,
    padding_idx: int,
) -> jax.Array:
    grad = dtypes.widen(grad)
    out = jnp.zeros((num_weights, grad.shape[1]), grad.dtype)
    if mode == _MAX:
        # A negative owner means an empty bag; the row past the end drops its gradient.
        owner = jnp.where(maximum_indices < 0, num_weights, maximum_indices).astype(np.int64)
        return out.at[owner, jnp.arange(grad.shape[1])[None, :]].add(grad, mode="drop")
    bag = offset2bag[: indices.shape[0]]
    rows = jnp.take(grad, bag, axis=0, mode="clip")
    if per_sample_weights is not None:
        rows = rows * dtypes.widen(per_sample_weights)[:, None]
    if mode == _MEAN:
        sizes = jnp.maximum(jnp.take(bag_size, bag, mode="clip"), 1)
        rows = divide(rows, sizes[:, None].astype(rows.dtype))
    indices = indices.astype(np.int64)
    if scale_grad_by_freq:
        counts = jnp.zeros((num_weights,), rows.dtype).at[indices].add(1, mode="drop")
        rows = rows / jnp.maximum(jnp.take(counts, indices, mode="clip"), 1)[:, None]
    target = jnp.where(_counted(indices, padding_idx), indices, num_weights)
    return out.at[target].add(rows, mode="drop")


@lowers("aten._embedding_bag_backward.default")
def _backward(
    ctx: Context,
    grad: jax.Array,
    indices: jax.Array,
    offsets: jax.Array,
    offset2bag: jax.Array,
    bag_size: jax.Array,
    maximum_indices: jax.Array,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: MaybeArray,
    padding_idx: int,
) -> jax.Array:
    bag = offset2bag if offset2bag.size else _bag_of(offsets, indices.shape[0], grad.shape[0])
    return _dense_backward(
        ctx,
        grad,
        indices,
        bag,
        bag_size,
        maximum_indices,
        num_weights,
        scale_grad_by_freq,
        mode,
        per_sample_weights,
        padding_idx,
    )


@lowers("aten._embedding_bag_per_sample_weights_backward.default")
def _weights_backward(
    ctx: Context,
    grad: jax.Array,
    weight: jax.Array,
    indices: jax.Array,
    offsets: jax.Array,
    offset2bag: jax.Array,
    mode: int,
    padding_idx: int,
) -> jax.Array:
    count = indices.shape[0]
    bag = offset2bag[:count] if offset2bag.size else _bag_of(offsets, count, grad.shape[0])
    rows = dtypes.widen(jnp.take(weight, indices, axis=0, mode="clip"))
    products = jnp.sum(rows * dtypes.widen(jnp.take(grad, bag, axis=0, mode="clip")), axis=-1)
    return jnp.where(_counted(indices, padding_idx), products, 0)
