"""Rules for normalization over layers, groups, batches and weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from torch_xla.ops import division, dtypes
from torch_xla.ops.args import along, axis
from torch_xla.ops.arithmetic import add, multiply, subtract, total
from torch_xla.ops.reduction import vector_norm
from torch_xla.ops.registry import Context, NumberInput, array_of, lowers

MaybeArray = jax.Array | None
Three = tuple[MaybeArray, MaybeArray, MaybeArray]


def _moments(x: jax.Array, dims: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Mean and biased variance over `dims`, kept as dimensions of size 1."""
    mean = division.mean(x, dims)
    # Two passes: E[x^2] - E[x]^2 cancels where the mean is large.
    return mean, division.mean(lax.square(subtract(x, mean)), dims)


def _normalize_grad(grad: jax.Array, normalized: jax.Array, rstd: jax.Array, dims: Sequence[int]) -> jax.Array:
    """Gradient of ``(x - mean) * rstd`` by ``x``, given the gradient of its result and the result."""
    mean_grad = division.mean(grad, dims)
    mean_dot = division.mean(multiply(grad, normalized), dims)
    return multiply(rstd, subtract(subtract(grad, mean_grad), multiply(normalized, mean_dot)))


@lowers("aten.native_layer_norm.default")
def _layer_norm(
    ctx: Context, x: jax.Array, shape: Sequence[int], weight: MaybeArray, bias: MaybeArray, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    x = dtypes.widen(x)
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    mean, variance = _moments(x, dims)
    rstd = lax.rsqrt(add(variance, jnp.full_like(variance, array_of(eps))))
    out = multiply(subtract(x, mean), rstd)
    if weight is not None:
        out = multiply(out, dtypes.widen(weight))
    if bias is not None:
        out = add(out, dtypes.widen(bias))
    return out, mean, rstd


@lowers("aten.native_layer_norm_backward.default")
def _layer_norm_backward(
    ctx: Context,
    grad: jax.Array,
    x: jax.Array,
    shape: Sequence[int],
    mean: jax.Array,
    rstd: jax.Array,
    weight: MaybeArray,
    bias: MaybeArray,
    output_mask: Sequence[bool],
) -> Three:
    grad, x, mean, rstd = dtypes.widen(grad), dtypes.widen(x), dtypes.widen(mean), dtypes.widen(rstd)
    rows = tuple(range(x.ndim - len(shape)))
    dims = tuple(range(len(rows), x.ndim))
    normalized = multiply(subtract(x, mean), rstd)
    scaled = grad if weight is None else multiply(grad, dtypes.widen(weight))
    return (
        _normalize_grad(scaled, normalized, rstd, dims) if output_mask[0] else None,
        total(multiply(grad, normalized), rows) if output_mask[1] and weight is not None else None,
        total(grad, rows) if output_mask[2] and bias is not None else None,
    )


@lowers("aten._fused_rms_norm.default")
def _rms_norm(
    ctx: Context, x: jax.Array, shape: Sequence[int], weight: MaybeArray, eps: float | None
) -> tuple[jax.Array, jax.Array]:
    if eps is None:
        eps = float(jnp.finfo(dtypes.widen(x).dtype).eps)
    x = dtypes.widen(x)
    dims = tuple(range(x.ndim - len(shape), x.ndim))
    rstd = lax.rsqrt(division.mean(jnp.square(x), dims) + eps)
    out = x * rstd
    return (out if weight is None else out * dtypes.widen(weight)), rstd


@lowers("aten._fused_rms_norm_backward.default")
def _rms_norm_backward(
    ctx: Context,
    grad: jax.Array,
    x: jax.Array,
    shape: Sequence[int],
    rstd: jax.Array,
    weight: MaybeArray,
    output_mask: Sequence[bool],
) -> tuple[MaybeArray, MaybeArray]:
    grad, x, rstd = dtypes.widen(grad), dtypes.widen(x), dtypes.widen(rstd)
    rows = tuple(range(x.ndim - len(shape)))
    dims = tuple(range(len(rows), x.ndim))
    normalized = x * rstd
    scaled = grad if weight is None else grad * dtypes.widen(weight)
    grad_x = rstd * (scaled - normalized * division.mean(scaled * normalized, dims))
    grad_weight = jnp.sum(grad * normalized, axis=rows) if output_mask[1] and weight is not None else None
    return (grad_x if output_mask[0] else None), grad_weight


@lowers("aten.native_group_norm.default")
def _group_norm(
    ctx: Context,
    x: jax.Array,
    weight: MaybeArray,
    bias: MaybeArray,
    n: int,
    c: int,
    hxw: int,
    groups: int,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    grouped = jnp.reshape(dtypes.widen(x), (n, groups, c // groups, hxw))
    mean, variance = _moments(grouped, (2, 3))
    rstd = lax.rsqrt(variance + eps)
    out = (grouped - mean) * rstd
    if weight is not None:
        out = out * jnp.reshape(dtypes.widen(weight), (1, groups, c // groups, 1))
    if bias is not None:
        out = out + jnp.reshape(dtypes.widen(bias), (1, groups, c // groups, 1))
    return jnp.reshape(out, x.shape), mean[:, :, 0, 0], rstd[:, :, 0, 0]


@lowers("aten.native_group_norm_backward.default")
def _group_norm_backward(
    ctx: Context,
    grad: jax.Array,
    x: jax.Array,
    mean: jax.Array,
    rstd: jax.Array,
    weight: MaybeArray,
    n: int,
    c: int,
    hxw: int,
    groups: int,
    output_mask: Sequence[bool],
) -> Three:
    shape = (n, groups, c // groups, hxw)
    grad, grouped = jnp.reshape(dtypes.widen(grad), shape), jnp.reshape(dtypes.widen(x), shape)
    rstd = jnp.reshape(dtypes.widen(rstd), (n, groups, 1, 1))
    normalized = (grouped - jnp.reshape(dtypes.widen(mean), (n, groups, 1, 1))) * rstd
    scaled = grad if weight is None else grad * jnp.reshape(dtypes.widen(weight), (1, groups, c // groups, 1))
    return (
        jnp.reshape(_normalize_grad(scaled, normalized, rstd, (2, 3)), x.shape) if output_mask[0] else None,
        jnp.reshape(jnp.sum(grad * normalized, axis=(0, 3)), (c,)) if output_mask[1] else None,
        jnp.reshape(jnp.sum(grad, axis=(0, 3)), (c,)) if output_mask[2] else None,
    )


def _batch_norm(
    x: jax.Array,
    weight: MaybeArray,
    bias: MaybeArray,
    running_mean: MaybeArray,
    running_var: MaybeArray,
    training: bool,
    momentum: float | NumberInput,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array, MaybeArray, MaybeArray]:
    """Result, mean, 1/std, and the running statistics as they are afterwards."""
    x = dtypes.widen(x)
    dims = (0, *range(2, x.ndim))
    if training or running_mean is None or running_var is None:
        mean, variance = (jnp.reshape(m, (-1,)) for m in _moments(x, dims))
        if running_mean is not None and running_var is not None:
            count = math.prod(x.shape[d] for d in dims)
            unbiased = variance * (count / max(count - 1, 1))
            new = momentum.value if isinstance(momentum, NumberInput) else momentum
            old, new = (dtypes.cast(part, dtypes.dtype_of(mean)) for part in (1 - new, new))
            running_mean = old * dtypes.widen(running_mean) + new * mean
            running_var = old * dtypes.widen(running_var) + new * unbiased
    else:
        mean, variance = dtypes.widen(running_mean), dtypes.widen(running_var)
    rstd = lax.rsqrt(variance + eps)
    factor = rstd if weight is None else rstd * dtypes.widen(weight)
    out = (x - along(mean, 1, x.ndim)) * along(factor, 1, x.ndim)
    if bias is not None:
        out = out + along(dtypes.widen(bias), 1, x.ndim)
    return out, mean, rstd, running_mean, running_var


def _as_returned(ctx: Context, result: int, x: jax.Array) -> jax.Array:
    """The statistic, or the empty tensor that PyTorch returns in its place in evaluation."""
    meta = ctx.out[result]
    return jnp.zeros(meta.shape, x.dtype) if meta is not None and meta.shape != x.shape else x


@lowers(
    "aten.native_batch_norm.default",
    "aten._native_batch_norm_legit.default",
    "aten._native_batch_norm_legit_functional.default",
)
def _native_batch_norm(ctx: Context, *args: Any) -> tuple[MaybeArray, ...]:
    out, mean, rstd, *running = _batch_norm(*args)
    return out, _as_returned(ctx, 1, mean), _as_returned(ctx, 2, rstd), *(running if len(ctx.out) == 5 else ())


@lowers("aten._native_batch_norm_legit_no_training.default")
def _batch_norm_no_training(ctx: Context, *args: Any) -> tuple[MaybeArray, ...]:
    *tensors, momentum, eps = args
    return _native_batch_norm(ctx, *tensors, False, momentum, eps)


@lowers("aten._native_batch_norm_legit.no_stats")
def _batch_norm_no_stats(ctx: Context, *args: Any) -> tuple[MaybeArray, ...]:
    *tensors, _, momentum, eps = args
    return _native_batch_norm(ctx, *tensors, None, None, True, momentum, eps)


@lowers("aten._batch_norm_with_update_functional.default")
def _batch_norm_with_update(ctx: Context, *args: Any) -> tuple[MaybeArray, ...]:
    full = [*args[:-2], True, *args[-2:]]
    out, mean, rstd, *running = _batch_norm(*full)
    return out, mean, rstd, jnp.zeros((0,), jnp.uint8), *running


@lowers("aten._batch_norm_no_update.default")
def _batch_norm_no_update(ctx: Context, *args: Any) -> tuple[MaybeArray, ...]:
    return *_batch_norm_no_training(ctx, *args), jnp.zeros((0,), jnp.uint8)


@lowers("aten.native_batch_norm_backward.default", "aten.batch_norm_backward.default")
def _batch_norm_backward(
    ctx: Context,
    grad: jax.Array,
    x: jax.Array,
    weight: MaybeArray,
    running_mean: MaybeArray,
    running_var: MaybeArray,
    save_mean: MaybeArray,
    save_rstd: MaybeArray,
    training: bool,
    eps: float,
    output_mask: Sequence[bool],
    reserve: MaybeArray = None,
) -> Three:
    grad, x = dtypes.widen(grad), dtypes.widen(x)
    dims = (0, *range(2, x.ndim))
    if training:
        assert save_mean is not None and save_rstd is not None
        mean, rstd = dtypes.widen(save_mean), dtypes.widen(save_rstd)
    else:
        assert running_mean is not None and running_var is not None
        mean, rstd = dtypes.widen(running_mean), lax.rsqrt(dtypes.widen(running_var) + eps)
    rstd_across = along(rstd, 1, x.ndim)
    normalized = (x - along(mean, 1, x.ndim)) * rstd_across
    scaled = grad if weight is None else grad * along(dtypes.widen(weight), 1, x.ndim)
    grad_x = None
    if output_mask[0]:
        grad_x = _normalize_grad(scaled, normalized, rstd_across, dims) if training else scaled * rstd_across
    return (
        grad_x,
        jnp.sum(grad * normalized, axis=dims) if output_mask[1] else None,
        jnp.sum(grad, axis=dims) if output_mask[2] else None,
    )


@lowers("aten._weight_norm_interface_backward.default")
def _weight_norm_backward(
    ctx: Context, grad: jax.Array, v: jax.Array, g: jax.Array, norms: jax.Array, dim: int
) -> tuple[jax.Array, jax.Array]:
    grad, v, g, norms = dtypes.widen(grad), dtypes.widen(v), dtypes.widen(g), dtypes.widen(norms)
    dims = tuple(d for d in range(v.ndim) if d != axis(dim, v.ndim))
    dot = jnp.sum(grad * v, axis=dims, keepdims=True)
    return (g / norms) * (grad - v * (dot / jnp.square(norms))), dot / norms


@lowers("aten.embedding_renorm.default")
def _embedding_renorm(
    ctx: Context, weight: jax.Array, indices: jax.Array, max_norm: float, norm_type: float
) -> jax.Array:
    used = jnp.zeros((weight.shape[0], 1), bool).at[jnp.reshape(indices, (-1,))].set(True)
    norm = vector_norm(dtypes.widen(weight, floating=True), norm_type, 1, True)
    factor = jnp.where(norm > max_norm, max_norm / (norm + 1e-7), jnp.ones((), norm.dtype))
    return jnp.where(used, weight * factor.astype(weight.dtype), weight)
