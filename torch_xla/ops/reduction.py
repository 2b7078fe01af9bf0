"""Reductions: sums, products, extremes, moments, norms and truth over dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from torch_xla.ops import division, dtypes
from torch_xla.ops.arithmetic import total
from torch_xla.ops.registry import Context, NumberInput, lowers

Dims = int | Sequence[int] | None


def axes(x: jax.Array, dim: Dims) -> tuple[int, ...]:
    """Reduced dimensions, counted from the front; None and the empty list mean all, a 0-d array has none."""
    if x.ndim == 0:
        return ()
    if dim is None:
        return tuple(range(x.ndim))
    dims = (dim,) if isinstance(dim, int) else tuple(dim)
    return tuple(d % x.ndim for d in dims) or tuple(range(x.ndim))


def _size(x: jax.Array, dims: tuple[int, ...]) -> int:
    return math.prod(x.shape[d] for d in dims)


def _to_accumulate(ctx: Context, x: jax.Array) -> jax.Array:
    """The operand in the type that the result is accumulated in."""
    return dtypes.cast(x, dtypes.opmath(ctx.meta.dtype))


# Sums and products.


@lowers("aten.sum.dim_IntList", "aten.sum.default")
def _sum(ctx: Context, x: jax.Array, dim: Dims = None, keepdim: bool = False, *, dtype: Any) -> jax.Array:
    x = _to_accumulate(ctx, x)
    if x.dtype == jnp.bool_:
        return jnp.any(x, axis=axes(x, dim), keepdims=keepdim)
    return total(x, axes(x, dim), keepdim)


@lowers("aten.mean.dim", "aten.mean.default")
def _mean(ctx: Context, x: jax.Array, dim: Dims = None, keepdim: bool = False, *, dtype: Any) -> jax.Array:
    dims = axes(x, dim)
    total = _sum(ctx, x, dims if x.ndim else None, keepdim, dtype=dtype)
    return division.divide(total, _to_accumulate(ctx, jnp.asarray(_size(x, dims))))


@lowers("aten.prod.dim_int", "aten.prod.default")
def _prod(ctx: Context, x: jax.Array, dim: Dims = None, keepdim: bool = False, *, dtype: Any) -> jax.Array:
    x = _to_accumulate(ctx, x)
    if x.dtype == jnp.bool_:
        return jnp.all(x, axis=axes(x, dim), keepdims=keepdim)
    return jnp.prod(x, axis=axes(x, dim), keepdims=keepdim, dtype=x.dtype)


# Truth.


@lowers("aten.any.dim", "aten.any.dims", "aten.any.default", "aten._is_any_true.default")
def _any(ctx: Context, x: jax.Array, dim: Dims = None, keepdim: bool = False) -> jax.Array:
    return jnp.any(x != 0, axis=axes(x, dim), keepdims=keepdim)


@lowers("aten.all.dim", "aten.all.dims", "aten.all.default", "aten._is_all_true.default")
def _all(ctx: Context, x: jax.Array, dim: Dims = None, keepdim: bool = False) -> jax.Array:
    return jnp.all(x != 0, axis=axes(x, dim), keepdims=keepdim)


# Extremes. NaN wins, and of equal values the first.


def _order(x: jax.Array) -> jax.Array:
    """The operand in a type that XLA can search; bools become bytes."""
    return x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x


def _place(x: jax.Array, dim: int | None, keepdim: bool, largest: bool) -> jax.Array:
    if x.ndim == 0:
        return jnp.zeros((), jnp.int64)
    search = lax.argmax if largest else lax.argmin
    if dim is None:
        position = search(_order(x).reshape(-1), 0, jnp.int64)
        return position.reshape((1,) * x.ndim) if keepdim else position
    dim %= x.ndim
    position = search(_order(x), dim, jnp.int64)
    return jnp.expand_dims(position, dim) if keepdim else position


@lowers("aten.argmax.default")
def _argmax(ctx: Context, x: jax.Array, dim: int | None, keepdim: bool) -> jax.Array:
    return _place(x, dim, keepdim, largest=True)


@lowers("aten.argmin.default")
def _argmin(ctx: Context, x: jax.Array, dim: int | None, keepdim: bool) -> jax.Array:
    return _place(x, dim, keepdim, largest=False)


@lowers("aten.amax.default", "aten.max.default")
def _amax(ctx: Context, x: jax.Array, dim: Dims = None, keepdim: bool = False) -> jax.Array:
    return jnp.max(x, axis=axes(x, dim), keepdims=keepdim)


@lowers("aten.amin.default", "aten.min.default")
def _amin(ctx: Context, x: jax.Array, dim: Dims = None, keepdim: bool = False) -> jax.Array:
    return jnp.min(x, axis=axes(x, dim), keepdims=keepdim)


@lowers("aten.max.dim")
def _max(ctx: Context, x: jax.Array, dim: int, keepdim: bool) -> tuple[jax.Array, jax.Array]:
    if x.size == 0:
        return _nothing(ctx)
    return _amax(ctx, x, dim, keepdim), _place(x, dim, keepdim, largest=True)


@lowers("aten.min.dim")
def _min(ctx: Context, x: jax.Array, dim: int, keepdim: bool) -> tuple[jax.Array, jax.Array]:
    if x.size == 0:
        return _nothing(ctx)
    return _amin(ctx, x, dim, keepdim), _place(x, dim, keepdim, largest=False)


def _nothing(ctx: Context) -> tuple[jax.Array, jax.Array]:
    """Values and places of an empty operand; PyTorch refuses the ones that would need a value."""
    return jnp.zeros(ctx.meta.shape, dtypes.numpy_dtype(ctx.meta.dtype)), jnp.zeros(ctx.meta.shape, jnp.int64)


@lowers("aten.aminmax.default", "aten._aminmax.default", "aten._aminmax.dim")
def _aminmax(ctx: Context, x: jax.Array, dim: int | None = None, keepdim: bool = False) -> tuple[jax.Array, jax.Array]:
    return _amin(ctx, x, dim, keepdim), _amax(ctx, x, dim, keepdim)


# Moments.


def _moments(x: jax.Array, dim: Dims, correction: Any, keepdim: bool) -> tuple[jax.Array, jax.Array]:
    """Variance and mean, in two passes."""
    x = dtypes.widen(x)
    dims = axes(x, dim)
    size = _size(x, dims)
    mean = division.mean(x, dims)
    distance = x - mean
    squares = (distance * lax.conj(distance)).real if dtypes.is_complex(x) else distance * distance
    count = dtypes.cast(1 if correction is None else correction, dtypes.dtype_of(squares))
    variance = division.divide(
        jnp.sum(squares, axis=dims, keepdims=keepdim), lax.max(size - count, jnp.zeros_like(count))
    )
    return variance, mean if keepdim else jnp.squeeze(mean, dims)


@lowers("aten.var.correction")
def _var(ctx: Context, x: jax.Array, dim: Dims, *, correction: Any, keepdim: bool) -> jax.Array:
    return _moments(x, dim, correction, keepdim)[0]


@lowers("aten.var_mean.correction")
def _var_mean(ctx: Context, x: jax.Array, dim: Dims, *, correction: Any, keepdim: bool) -> tuple[jax.Array, jax.Array]:
    return _moments(x, dim, correction, keepdim)


# Norms.


def vector_norm(x: jax.Array, order: float | NumberInput, dim: Dims, keepdim: bool) -> jax.Array:
    """The norm of an order over dimensions; that of nothing is 0."""
    dims = axes(x, dim)
    size = lax.abs(x)
    if isinstance(order, NumberInput):
        return _norm_of_any_order(size, order.as_type(size), dims, keepdim)
    if order == math.inf:
        return jnp.max(size, axis=dims, keepdims=keepdim, initial=0)
    if order == -math.inf:
        return jnp.min(size, axis=dims, keepdims=keepdim)
    if order == 0:
        return jnp.sum((size != 0).astype(size.dtype), axis=dims, keepdims=keepdim)
    if order == 1:
        return jnp.sum(size, axis=dims, keepdims=keepdim)
    if order == 2:
        return lax.sqrt(jnp.sum(size * size, axis=dims, keepdims=keepdim))
    powers = lax.pow(size, jnp.full_like(size, order))
    total = jnp.sum(powers, axis=dims, keepdims=keepdim)
    return lax.pow(total, jnp.full_like(total, 1.0 / order))


def _norm_of_any_order(size: jax.Array, order: jax.Array, dims: tuple[int, ...], keepdim: bool) -> jax.Array:
    total = jnp.sum(lax.pow(size, jnp.full_like(size, order)), axis=dims, keepdims=keepdim)
    general = lax.pow(total, jnp.full_like(total, 1.0 / order))
    count = jnp.sum((size != 0).astype(size.dtype), axis=dims, keepdims=keepdim)
    greatest, least = jnp.max(size, axis=dims, keepdims=keepdim), jnp.min(size, axis=dims, keepdims=keepdim)
    return jnp.where(
        order == 0, count, jnp.where(order == jnp.inf, greatest, jnp.where(order == -jnp.inf, least, general))
    )


@lowers("aten.linalg_vector_norm.default")
def _linalg_vector_norm(ctx: Context, x: jax.Array, order: Any, dim: Dims, keepdim: bool, *, dtype: Any) -> jax.Array:
    if dtype is not None:  # recorded as a number; the result is of this type, real where that is complex
        compute_dtype = dtypes.opmath(ctx.meta.dtype)
        x = dtypes.cast(x, compute_dtype.to_complex() if jnp.iscomplexobj(x) else compute_dtype)
    else:
        x = dtypes.widen(x)
    return vector_norm(x, order, dim, keepdim)


@lowers(
    "aten.norm.Scalar",
    "aten.norm.ScalarOpt_dim",
    "aten.norm.ScalarOpt_dim_dtype",
    "aten.norm.ScalarOpt_dtype",
)
def _norm(
    ctx: Context, x: jax.Array, order: Any, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> jax.Array:
    return _linalg_vector_norm(ctx, x, 2 if order is None else order, dim, keepdim, dtype=dtype)


@lowers("aten.dist.default")
def _dist(ctx: Context, x: jax.Array, y: jax.Array, order: Any) -> jax.Array:
    x, y = dtypes.promote(x, y)
    return vector_norm(x - y, order, None, False)
