"""The activation functions that most networks have, with their derivatives, and the softmax family."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from torch_xla.ops import dtypes
from torch_xla.ops.args import axis
from torch_xla.ops.arithmetic import multiply, subtract, total
from torch_xla.ops.registry import Context, lowers

_SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
_GELU_CUBIC = 0.044715


def _numbers(x: jax.Array, *numbers: Any) -> list[jax.Array]:
    return [dtypes.cast(number, dtypes.dtype_of(x)) for number in numbers]


# Rectifiers and clipped lines.


@lowers("aten.threshold_backward.default")
def _threshold_backward(ctx: Context, grad: jax.Array, x: jax.Array, threshold: Any) -> jax.Array:
    (threshold,) = _numbers(x, threshold)
    return jnp.where(x <= threshold, jnp.zeros_like(grad), grad)


@lowers("aten.leaky_relu.default")
def _leaky_relu(ctx: Context, x: jax.Array, slope: Any) -> jax.Array:
    x = dtypes.widen(x)
    (slope,) = _numbers(x, slope)
    return jnp.where(x > 0, x, x * slope)


@lowers("aten.leaky_relu_backward.default")
def _leaky_relu_backward(ctx: Context, grad: jax.Array, x: jax.Array, slope: Any, is_result: bool) -> jax.Array:
    # The result has the sign of the input, so either serves.
    grad, x = dtypes.promote(grad, x)
    (slope,) = _numbers(x, slope)
    return jnp.where(x > 0, grad, grad * slope)


@lowers("aten.hardtanh.default")
def _hardtanh(ctx: Context, x: jax.Array, low: Any, high: Any) -> jax.Array:
    low, high = _numbers(x, low, high)
    return lax.min(lax.max(x, jnp.broadcast_to(low, x.shape)), jnp.broadcast_to(high, x.shape))


@lowers("aten.hardtanh_backward.default")
def _hardtanh_backward(ctx: Context, grad: jax.Array, x: jax.Array, low: Any, high: Any) -> jax.Array:
    low, high = _numbers(x, low, high)
    return jnp.where((x <= low) | (x >= high), jnp.zeros_like(grad), grad)


@lowers("aten.hardshrink_backward.default", "aten.softshrink_backward.default")
def _shrink_backward(ctx: Context, grad: jax.Array, x: jax.Array, lambd: Any) -> jax.Array:
    (lambd,) = _numbers(x, lambd)
    return jnp.where((x >= -lambd) & (x <= lambd), jnp.zeros_like(grad), grad)


# Smooth gates.


@lowers("aten.silu.default")
def _silu(ctx: Context, x: jax.Array) -> jax.Array:
    x = dtypes.widen(x)
    return x * lax.logistic(x)


@lowers("aten.silu_backward.default")
def _silu_backward(ctx: Context, grad: jax.Array, x: jax.Array) -> jax.Array:
    grad, x = dtypes.promote(grad, x)
    gate = lax.logistic(x)
    return grad * gate * (1 + x * (1 - gate))


@lowers("aten.gelu.default")
def _gelu(ctx: Context, x: jax.Array, *, approximate: str) -> jax.Array:
    x = dtypes.widen(x)
    if approximate == "tanh":
        return 0.5 * x * (1 + lax.tanh(_SQRT_2_OVER_PI * (x + _GELU_CUBIC * x * x * x)))
    return 0.5 * x * (1 + lax.erf(x * math.sqrt(0.5)))


@lowers("aten.gelu_backward.default")
def _gelu_backward(ctx: Context, grad: jax.Array, x: jax.Array, *, approximate: str) -> jax.Array:
    grad, x = dtypes.promote(grad, x)
    if approximate == "tanh":
        gate = lax.tanh(_SQRT_2_OVER_PI * (x + _GELU_CUBIC * x * x * x))
        slope = (1 - gate * gate) * _SQRT_2_OVER_PI * (1 + 3 * _GELU_CUBIC * x * x)
        return grad * 0.5 * (1 + gate + x * slope)
    cdf = 0.5 * (1 + lax.erf(x * math.sqrt(0.5)))
    pdf = lax.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return grad * (cdf + x * pdf)


@lowers("aten.sigmoid_backward.default")
def _sigmoid_backward(ctx: Context, grad: jax.Array, y: jax.Array) -> jax.Array:
    grad, y = dtypes.promote(grad, y)
    return grad * jnp.conj((1 - y) * y)


@lowers("aten.tanh_backward.default")
def _tanh_backward(ctx: Context, grad: jax.Array, y: jax.Array) -> jax.Array:
    grad, y = dtypes.promote(grad, y)
    slope = subtract(lax.full_like(y, 1), multiply(y, y))
    return multiply(grad, lax.conj(slope) if dtypes.is_complex(slope) else slope)


# Softmax family.


@lowers("aten._softmax.default")
def _softmax(ctx: Context, x: jax.Array, dim: int, half_to_float: bool) -> jax.Array:
    x = dtypes.widen(x)
    if x.ndim == 0 or x.size == 0:
        return x * 0 + 1
    weights = lax.exp(x - lax.stop_gradient(jnp.max(x, axis=dim, keepdims=True)))
    return weights / jnp.sum(weights, axis=dim, keepdims=True)


@lowers("aten._log_softmax.default")
def _log_softmax(ctx: Context, x: jax.Array, dim: int, half_to_float: bool) -> jax.Array:
    x = dtypes.widen(x)
    if x.ndim == 0 or x.size == 0:
        return x * 0
    shifted = subtract(x, jnp.max(x, axis=dim, keepdims=True))
    return subtract(shifted, lax.log(total(lax.exp(shifted), [axis(dim, x.ndim)], keepdims=True)))


@lowers("aten._softmax_backward_data.default")
def _softmax_backward(ctx: Context, grad: jax.Array, y: jax.Array, dim: int, input_dtype: Any) -> jax.Array:
    grad, y = dtypes.promote(grad, y)
    weighted = grad * y
    return weighted - y * (jnp.sum(weighted, axis=dim, keepdims=True) if y.ndim else weighted)


@lowers("aten._log_softmax_backward_data.default")
def _log_softmax_backward(ctx: Context, grad: jax.Array, y: jax.Array, dim: int, input_dtype: Any) -> jax.Array:
    grad, y = dtypes.promote(grad, y)
    summed = total(grad, [axis(dim, y.ndim)], keepdims=True) if y.ndim else grad
    return subtract(grad, multiply(lax.exp(y), summed))
