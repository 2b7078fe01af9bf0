"""Rules for operators that make a tensor from numbers alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_xla.ops import dtypes
from torch_xla.ops.registry import Context, lowers


def _filled(ctx: Context, number: Any) -> jax.Array:
    return jnp.broadcast_to(dtypes.cast(number, ctx.meta.dtype), ctx.meta.shape)


@lowers(
    "aten.zeros.default",
    "aten.zeros_like.default",
    "aten.new_zeros.default",
    "aten.empty.memory_format",
    "aten.empty_strided.default",
    "aten.empty_permuted.default",
    "aten._efficientzerotensor.default",
    "aten.empty_like.default",
    "aten.new_empty.default",
    "aten.new_empty_strided.default",
)
def _zeros(ctx: Context, *_: Any, **__: Any) -> jax.Array:
    return _filled(ctx, 0)


@lowers("aten.ones.default", "aten.ones_like.default", "aten.new_ones.default")
def _ones(ctx: Context, *_: Any, **__: Any) -> jax.Array:
    return _filled(ctx, 1)


@lowers("aten.full.default", "aten.full_like.default", "aten.new_full.default", "aten.scalar_tensor.default")
def _full(ctx: Context, *args: Any, **_: Any) -> jax.Array:
    return _filled(ctx, args[-1])


@lowers("aten.arange.default", "aten.arange.start", "aten.arange.start_step")
def _arange(ctx: Context, start: Any, end: Any = None, step: Any = 1, **_: Any) -> jax.Array:
    """``start + i * step``; the length is the Meta kernel's, so both numbers may be program inputs."""
    wide = torch.float64 if ctx.meta.dtype.is_floating_point else torch.int64
    start = 0 if end is None else start
    index = lax.iota(dtypes.numpy_dtype(wide), ctx.meta.shape[0])
    return dtypes.cast(start, wide) + index * dtypes.cast(step, wide)


def _between(ctx: Context, start: Any, end: Any, steps: int) -> jax.Array:
    """Evenly spaced values, counted from the nearer end so that both ends are exact."""
    dtype = ctx.meta.dtype
    wide = dtype if dtype.is_complex else torch.float64
    if not (dtype.is_complex or dtype.is_floating_point):  # the ends are cut to integers first
        start, end = dtypes.cast(start, dtype), dtypes.cast(end, dtype)
    start, end = dtypes.cast(start, wide), dtypes.cast(end, wide)
    if steps == 1:
        return jnp.reshape(start, (1,))
    index = jnp.arange(steps)
    step = (end - start) / max(steps - 1, 1)
    return jnp.where(index < steps // 2, start + step * index, end - step * (steps - 1 - index))


@lowers(
    "aten.linspace.default",
    "aten.linspace.Tensor_Tensor",
    "aten.linspace.Tensor_Scalar",
    "aten.linspace.Scalar_Tensor",
)
def _linspace(ctx: Context, start: Any, end: Any, steps: int, **_: Any) -> jax.Array:
    return _between(ctx, start, end, steps)


@lowers(
    "aten.logspace.default",
    "aten.logspace.Tensor_Tensor",
    "aten.logspace.Tensor_Scalar",
    "aten.logspace.Scalar_Tensor",
)
def _logspace(ctx: Context, start: Any, end: Any, steps: int, base: float, **_: Any) -> jax.Array:
    return jnp.power(base, _between(ctx, start, end, steps))


@lowers("aten.kaiser_window.default", "aten.kaiser_window.periodic", "aten.kaiser_window.beta")
def _kaiser(ctx: Context, length: int, periodic: bool = True, beta: float = 12.0, **_: Any) -> jax.Array:
    # A periodic window is a symmetric one without its last point.
    points = length + 1 if periodic and length > 1 else length
    return jnp.kaiser(points, jnp.float64(beta))[:length]


@lowers("aten.tril_indices.default")
def _tril_indices(ctx: Context, rows: int, columns: int, offset: int, **_: Any) -> jax.Array:
    return jnp.asarray(torch.tril_indices(rows, columns, offset).numpy())


@lowers("aten.triu_indices.default")
def _triu_indices(ctx: Context, rows: int, columns: int, offset: int, **_: Any) -> jax.Array:
    return jnp.asarray(torch.triu_indices(rows, columns, offset).numpy())
