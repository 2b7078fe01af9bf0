"""Loss functions and their derivatives."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from torch_xla.ops import dtypes
from torch_xla.ops.division import divide
from torch_xla.ops.registry import Context, lowers

_NONE, _MEAN = 0, 1


def _reduce(loss: jax.Array, reduction: int) -> jax.Array:
    """`loss` itself, its mean, or its sum, by PyTorch's code for the reduction."""
    if reduction == _NONE:
        return loss
    total = jnp.sum(loss, dtype=loss.dtype)
    if reduction != _MEAN:
        return total
    return divide(total, loss.size)


def _spread(grad: jax.Array, size: int, reduction: int, factor: int = 1) -> jax.Array:
    """The derivative by each element's loss; PyTorch counts those of the input, which may be fewer than losses."""
    if reduction != _MEAN or not size:
        return grad * factor
    return (
        divide(grad, size) * factor if dtypes.is_floating(grad) or dtypes.is_complex(grad) else grad * (factor // size)
    )


# Distances.


@lowers("aten.mse_loss.default")
def _mse(ctx: Context, x: jax.Array, target: jax.Array, reduction: int) -> jax.Array:
    x, target = dtypes.promote(x, target)
    return _reduce((x - target) ** 2, reduction)


@lowers("aten.mse_loss_backward.default")
def _mse_backward(ctx: Context, grad: jax.Array, x: jax.Array, target: jax.Array, reduction: int) -> jax.Array:
    size = x.size
    grad, x, target = dtypes.promote(grad, x, target)
    return _spread(grad, size, reduction, 2) * (x - target)


@lowers("aten.smooth_l1_loss.default")
def _smooth_l1(ctx: Context, x: jax.Array, target: jax.Array, reduction: int, beta: Any) -> jax.Array:
    x, target = dtypes.promote(x, target)
    distance = lax.abs(x - target)
    beta = dtypes.cast(beta, dtypes.dtype_of(distance))
    # Of a beta of 0 nothing is below it, whatever that would be divided by.
    return _reduce(jnp.where(distance < beta, 0.5 * distance * distance / beta, distance - 0.5 * beta), reduction)


@lowers("aten.smooth_l1_loss_backward.default")
def _smooth_l1_backward(
    ctx: Context, grad: jax.Array, x: jax.Array, target: jax.Array, reduction: int, beta: Any
) -> jax.Array:
    size = x.size
    grad, x, target = dtypes.promote(grad, x, target)
    distance = x - target
    beta = dtypes.cast(beta, dtypes.dtype_of(distance))
    slope = jnp.where(lax.abs(distance) < beta, distance / beta, lax.sign(distance))
    return _spread(grad, size, reduction) * slope


@lowers("aten.huber_loss.default")
def _huber(ctx: Context, x: jax.Array, target: jax.Array, reduction: int, delta: Any) -> jax.Array:
    x, target = dtypes.promote(x, target)
    distance = lax.abs(x - target)
    delta = dtypes.cast(delta, dtypes.dtype_of(distance))
    loss = jnp.where(distance <= delta, 0.5 * distance * distance, delta * (distance - 0.5 * delta))
    return _reduce(loss, reduction)


@lowers("aten.huber_loss_backward.default")
def _huber_backward(
    ctx: Context, grad: jax.Array, x: jax.Array, target: jax.Array, reduction: int, delta: Any
) -> jax.Array:
    size = x.size
    grad, x, target = dtypes.promote(grad, x, target)
    delta = dtypes.cast(delta, dtypes.dtype_of(x))
    return _spread(grad, size, reduction) * jnp.clip(x - target, -delta, delta)


# Cross entropies.


def _class_weights(
    x: jax.Array, target: jax.Array, weight: jax.Array | None, ignore_index: int
) -> tuple[jax.Array, jax.Array]:
    """For each target a class that can be looked up, and its weight: 0 where the target is ignored."""
    is_valid = target != ignore_index
    place = jnp.where(is_valid, target, jnp.zeros_like(target))
    if weight is None:
        return place, is_valid.astype(x.dtype)
    return place, jnp.where(is_valid, dtypes.cast(weight, dtypes.dtype_of(x))[place], jnp.zeros((), x.dtype))


def _classes(target: jax.Array) -> jax.Array:
    """Class numbers in a type that also holds the ignored one, which may be negative, and any number of classes."""
    return target.astype(jnp.int32) if target.dtype == jnp.uint8 else target


@lowers("aten.nll_loss_forward.default", "aten.nll_loss2d_forward.default")
def _nll_forward(
    ctx: Context, x: jax.Array, target: jax.Array, weight: jax.Array | None, reduction: int, ignore_index: int
) -> tuple[jax.Array, jax.Array]:
    x, target, dim = dtypes.widen(x), _classes(target), min(x.ndim - 1, 1)
    place, weights = _class_weights(x, target, weight, ignore_index)
    picked = jnp.squeeze(jnp.take_along_axis(x, jnp.expand_dims(place, dim), axis=dim), dim)
    # Ignored targets give 0 whatever the input holds there.
    loss = jnp.where(target != ignore_index, -picked * weights, jnp.zeros_like(picked))
    if reduction == _NONE and x.ndim > 1:
        return loss, jnp.zeros((), x.dtype)
    total, total_weight = jnp.sum(loss), jnp.sum(weights)
    return total / total_weight if reduction == _MEAN else total, total_weight


@lowers("aten.nll_loss_backward.default", "aten.nll_loss2d_backward.default")
def _nll_backward(
    ctx: Context,
    grad: jax.Array,
    x: jax.Array,
    target: jax.Array,
    weight: jax.Array | None,
    reduction: int,
    ignore_index: int,
    total_weight: jax.Array,
) -> jax.Array:
    x, grad, target, dim = dtypes.widen(x), dtypes.widen(grad), _classes(target), min(x.ndim - 1, 1)
    place, weights = _class_weights(x, target, weight, ignore_index)
    slope = -grad * weights / (dtypes.widen(total_weight) if reduction == _MEAN else 1)
    # With no target left both weights are 0, and nothing flows back.
    slope = jnp.where(weights == 0, jnp.zeros_like(slope), slope)
    classes = lax.broadcasted_iota(target.dtype, x.shape, dim)
    hit = classes == jnp.expand_dims(place, dim)
    return jnp.where(hit, jnp.expand_dims(slope, dim), jnp.zeros((), x.dtype))


# Margin losses over classes.


def _margins(
    x: jax.Array, target: jax.Array, margin: Any, weight: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows of violated margins, one-hot targets, and each row's weight divided by the number of classes."""
    x = jnp.atleast_2d(dtypes.widen(x))
    target = jnp.atleast_1d(target)
    hit = lax.broadcasted_iota(target.dtype, x.shape, 1) == target[:, None]
    target_scores = jnp.sum(jnp.where(hit, x, jnp.zeros_like(x)), axis=1, keepdims=True)
    gap = dtypes.cast(margin, dtypes.dtype_of(x)) - target_scores + x
    gap = jnp.where(hit, jnp.zeros_like(gap), jnp.maximum(gap, 0))
    rows = jnp.ones(target.shape, x.dtype) if weight is None else dtypes.cast(weight, dtypes.dtype_of(x))[target]
    return gap, hit, (rows / x.shape[1])[:, None]


@lowers("aten.multi_margin_loss_backward.default")
def _multi_margin_backward(
    ctx: Context,
    grad: jax.Array,
    x: jax.Array,
    target: jax.Array,
    p: Any,
    margin: Any,
    weight: jax.Array | None,
    reduction: int,
) -> jax.Array:
    gap, hit, rows = _margins(x, target, margin, weight)
    slope = rows * ((gap > 0).astype(gap.dtype) if ctx.constant(p) == 1 else 2 * gap)
    slope = jnp.where(hit, -jnp.sum(slope, axis=1, keepdims=True), slope)
    grad = _spread(dtypes.widen(grad), target.size, reduction)
    return (slope * grad.reshape(-1, 1)).reshape(x.shape)


def _labels(x: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Which of a row's target entries count (those before the first -1), and which classes they name."""
    counts = jnp.cumsum(target < 0, axis=1) == 0
    named = counts[:, :, None] & (target[:, :, None] == jnp.arange(x.shape[1], dtype=target.dtype))
    return counts, jnp.any(named, axis=1)


@lowers("aten.multilabel_margin_loss_forward.default")
def _multilabel_margin(ctx: Context, x: jax.Array, target: jax.Array, reduction: int) -> tuple[jax.Array, jax.Array]:
    rows, places = jnp.atleast_2d(dtypes.widen(x)), jnp.atleast_2d(target)
    counts, named = _labels(rows, places)
    target_scores = jnp.take_along_axis(rows, jnp.maximum(places, 0), axis=1)
    gap = jnp.maximum(1 - target_scores[:, :, None] + rows[:, None, :], 0)
    gap = jnp.where(counts[:, :, None] & ~named[:, None, :], gap, jnp.zeros_like(gap))
    loss = jnp.sum(gap, axis=(1, 2)) / rows.shape[1]
    return _reduce(loss.reshape(target.shape[:-1]), reduction), named.reshape(target.shape)


@lowers("aten.multilabel_margin_loss_backward.default")
def _multilabel_margin_backward(
    ctx: Context, grad: jax.Array, x: jax.Array, target: jax.Array, reduction: int, is_target: jax.Array
) -> jax.Array:
    rows, places = jnp.atleast_2d(dtypes.widen(x)), jnp.atleast_2d(target)
    counts, named = _labels(rows, places)
    target_scores = jnp.take_along_axis(rows, jnp.maximum(places, 0), axis=1)
    violated = (1 - target_scores[:, :, None] + rows[:, None, :] > 0) & counts[:, :, None] & ~named[:, None, :]
    slope = jnp.sum(violated, axis=1, dtype=rows.dtype)
    lost = jnp.sum(violated, axis=2, dtype=rows.dtype)
    hit = places[:, :, None] == jnp.arange(rows.shape[1], dtype=places.dtype)
    slope = slope - jnp.sum(jnp.where(hit, lost[:, :, None], jnp.zeros_like(lost)[:, :, None]), axis=1)
    grad = dtypes.widen(grad).reshape(-1, 1) / (rows.shape[0] if reduction == _MEAN else 1)
    return (slope / rows.shape[1] * grad).reshape(x.shape)
