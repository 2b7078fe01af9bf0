"""Loops over slices; running sums, products and extremes along one dimension."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torch_xla.ops import dtypes
from torch_xla.ops.elementwise import logaddexp
from torch_xla.ops.registry import Context, lowers


def scan(
    step: Callable[[Any, Any], tuple[Any, Any]], start: Any, slices: Any, count: int, reverse: bool = False
) -> tuple[Any, Any]:
    """`jax.lax.scan`, which JAX cannot differentiate, with a counter of 32 bits.

    JAX's own has 64 here. XLA for TPUs makes two numbers of that, and does not see how often such a loop turns.
    """

    def at(i: Any) -> Any:
        take = partial(lax.dynamic_index_in_dim, index=i, keepdims=False, allow_negative_indices=False)
        return jax.tree.map(take, slices)

    def turn(state: Any) -> Any:
        i, carried, arrays = state
        place = np.int32(count - 1) - i if reverse else i
        carried, results = step(carried, at(place))
        put = partial(lax.dynamic_update_index_in_dim, index=place, axis=0, allow_negative_indices=False)
        return i + np.int32(1), carried, jax.tree.map(put, arrays, results)

    shapes = jax.eval_shape(lambda state: step(state, at(np.int32(0)))[1], start)
    arrays = jax.tree.map(lambda shape: jnp.zeros((count, *shape.shape), shape.dtype), shapes)
    _, end, arrays = lax.while_loop(lambda state: state[0] < np.int32(count), turn, (jnp.int32(0), start, arrays))
    return end, arrays


@lowers("aten.cumsum.default")
def _cumsum(ctx: Context, x: jax.Array, dim: int, *, dtype: Any) -> jax.Array:
    x = dtypes.cast(x, dtypes.opmath(ctx.meta.dtype))
    return lax.cumsum(x, axis=dim % x.ndim) if x.ndim else x


@lowers("aten.cumprod.default")
def _cumprod(ctx: Context, x: jax.Array, dim: int, *, dtype: Any) -> jax.Array:
    x = dtypes.cast(x, dtypes.opmath(ctx.meta.dtype))
    return lax.cumprod(x, axis=dim % x.ndim) if x.ndim else x


@lowers("aten.logcumsumexp.default", "aten._logcumsumexp.default")
def _logcumsumexp(ctx: Context, x: jax.Array, dim: int) -> jax.Array:
    x = dtypes.widen(x, floating=True)
    if x.size <= 1:
        return x
    if dtypes.is_complex(x):
        return lax.associative_scan(logaddexp, x, axis=dim % x.ndim)
    return lax.cumlogsumexp(x, axis=dim % x.ndim)


def _running(x: jax.Array, dim: int, wins: Callable[[jax.Array, jax.Array], jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Best value so far and its place: of equal values the later one, and NaN for good once it occurred."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    places = lax.broadcasted_iota(jnp.int64, x.shape, dim)

    def pick(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        later = (right[0] != right[0]) | ((left[0] == left[0]) & wins(right[0], left[0]))
        return jnp.where(later, right[0], left[0]), jnp.where(later, right[1], left[1])

    return lax.associative_scan(pick, (x, places), axis=dim) if x.size else (x, places)


@lowers("aten.cummax.default")
def _cummax(ctx: Context, x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    return _running(x, dim, lax.ge)


@lowers("aten.cummin.default")
def _cummin(ctx: Context, x: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    return _running(x, dim, lax.le)


@lowers("aten._cummax_helper.default")
def _cummax_written(ctx: Context, x: jax.Array, values: object, places: object, dim: int) -> tuple[jax.Array, ...]:
    return _cummax(ctx, x, dim)


@lowers("aten._cummin_helper.default")
def _cummin_written(ctx: Context, x: jax.Array, values: object, places: object, dim: int) -> tuple[jax.Array, ...]:
    return _cummin(ctx, x, dim)
