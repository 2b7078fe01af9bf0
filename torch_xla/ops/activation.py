"""Activation functions of neural networks with their derivatives, and the softmax family."""

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


@lowers("aten.threshold.default")
def _threshold(ctx: Context, x: jax.Array, threshold: Any, value: Any) -> jax.Array:
    threshold, value = _numbers(x, threshold, value)
    return jnp.where(x <= threshold, value, x)


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


@lowers("aten._prelu_kernel.default")
def _prelu(ctx: Context, x: jax.Array, weight: jax.Array) -> jax.Array:
    x, weight = dtypes.promote(x, weight)
    return jnp.where(x > 0, x, x * weight)


@lowers("aten._prelu_kernel_backward.default")
def _prelu_backward(ctx: Context, grad: jax.Array, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    grad, x, weight = dtypes.promote(grad, x, weight)
    return jnp.where(x > 0, grad, grad * weight), jnp.where(x > 0, jnp.zeros_like(x), x * grad)


@lowers("aten.rrelu_with_noise_backward.default")
def _rrelu_backward(
    ctx: Context,
    grad: jax.Array,
    x: jax.Array,
    noise: jax.Array,
    lower: Any,
    upper: Any,
    training: bool,
    is_result: bool,
) -> jax.Array:
    if training:
        return grad * noise
    lower, upper = _numbers(dtypes.widen(x), lower, upper)
    return _leaky_relu_backward(ctx, grad, x, (lower + upper) / 2, is_result)


@lowers("aten.hardtanh.default")
def _hardtanh(ctx: Context, x: jax.Array, low: Any, high: Any) -> jax.Array:
    low, high = _numbers(x, low, high)
    return lax.min(lax.max(x, jnp.broadcast_to(low, x.shape)), jnp.broadcast_to(high, x.shape))


@lowers("aten.hardtanh_backward.default")
def _hardtanh_backward(ctx: Context, grad: jax.Array, x: jax.Array, low: Any, high: Any) -> jax.Array:
    low, high = _numbers(x, low, high)
    return jnp.where((x <= low) | (x >= high), jnp.zeros_like(grad), grad)


@lowers("aten.hardsigmoid.default")
def _hardsigmoid(ctx: Context, x: jax.Array) -> jax.Array:
    return jnp.clip(dtypes.widen(x) + 3, 0, 6) / 6


@lowers("aten.hardsigmoid_backward.default")
def _hardsigmoid_backward(ctx: Context, grad: jax.Array, x: jax.Array) -> jax.Array:
    grad, x = dtypes.promote(grad, x)
    return jnp.where((x > -3) & (x < 3), grad / 6, jnp.zeros_like(grad))


@lowers("aten.hardswish.default")
def _hardswish(ctx: Context, x: jax.Array) -> jax.Array:
    x = dtypes.widen(x)
    return x * jnp.clip(x + 3, 0, 6) / 6


@lowers("aten.hardswish_backward.default")
def _hardswish_backward(ctx: Context, grad: jax.Array, x: jax.Array) -> jax.Array:
    grad, x = dtypes.promote(grad, x)
    middle = grad * (x / 3 + 0.5)
    return jnp.where(x <= -3, jnp.zeros_like(grad), jnp.where(x < 3, middle, grad))


@lowers("aten.hardshrink.default")
def _hardshrink(ctx: Context, x: jax.Array, lambd: Any) -> jax.Array:
    (lambd,) = _numbers(x, lambd)
    return jnp.where((x >= -lambd) & (x <= lambd), jnp.zeros_like(x), x)


@lowers("aten.softshrink.default")
def _softshrink(ctx: Context, x: jax.Array, lambd: Any) -> jax.Array:
    x = dtypes.widen(x)
    (lambd,) = _numbers(x, lambd)
    # x * 0 keeps NaN.
    return jnp.where(x > lambd, x - lambd, jnp.where(x < -lambd, x + lambd, x * 0))


@lowers("aten.hardshrink_backward.default", "aten.softshrink_backward.default")
def _shrink_backward(ctx: Context, grad: jax.Array, x: jax.Array, lambd: Any) -> jax.Array:
    (lambd,) = _numbers(x, lambd)
    return jnp.where((x >= -lambd) & (x <= lambd), jnp.zeros_like(grad), grad)


# Exponential units.


@lowers("aten.elu.default")
def _elu(ctx: Context, x: jax.Array, alpha: Any, scale: Any, input_scale: Any) -> jax.Array:
    x = dtypes.widen(x)
    alpha, scale, input_scale = _numbers(x, alpha, scale, input_scale)
    return jnp.where(x > 0, x * scale, lax.expm1(x * input_scale) * (alpha * scale))


@lowers("aten.elu_backward.default")
def _elu_backward(
    ctx: Context, grad: jax.Array, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: jax.Array
) -> jax.Array:
    grad, x = dtypes.promote(grad, x)
    alpha, scale, input_scale = _numbers(x, alpha, scale, input_scale)
    if is_result:
        below = grad * input_scale * (x + alpha * scale)
    else:
        below = grad * (input_scale * alpha * scale) * lax.exp(x * input_scale)
    return jnp.where(x <= 0, below, grad * scale)


@lowers("aten.celu.default")
def _celu(ctx: Context, x: jax.Array, alpha: Any) -> jax.Array:
    x = dtypes.widen(x)
    (alpha,) = _numbers(x, alpha)
    return _elu(ctx, x, alpha, 1, 1 / alpha)


@lowers("aten.softplus.default")
def _softplus(ctx: Context, x: jax.Array, beta: Any, threshold: Any) -> jax.Array:
    x = dtypes.widen(x)
    beta, threshold = _numbers(x, beta, threshold)
    return jnp.where(x * beta > threshold, x, lax.log1p(lax.exp(x * beta)) / beta)


@lowers("aten.softplus_backward.default")
def _softplus_backward(ctx: Context, grad: jax.Array, x: jax.Array, beta: Any, threshold: Any) -> jax.Array:
    grad, x = dtypes.promote(grad, x)
    beta, threshold = _numbers(x, beta, threshold)
    return jnp.where(x * beta > threshold, grad, grad * lax.logistic(x * beta))


@lowers("aten.log_sigmoid_forward.default")
def _log_sigmoid(ctx: Context, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    wide = dtypes.widen(x)
    decay = lax.exp(-lax.abs(wide))
    # The CPU kernel saves exp(-|x|) for the derivative, other devices save an empty tensor.
    buffer = ctx.out[1]
    saved = decay if buffer is not None and buffer.shape == x.shape else jnp.zeros((0,), decay.dtype)
    return jnp.minimum(wide, 0) - lax.log1p(decay), saved


@lowers("aten.log_sigmoid_backward.default")
def _log_sigmoid_backward(ctx: Context, grad: jax.Array, x: jax.Array, buffer: jax.Array) -> jax.Array:
    grad, x = dtypes.promote(grad, x)
    return grad * lax.logistic(-x)


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


@lowers("aten.mish.default")
def _mish(ctx: Context, x: jax.Array) -> jax.Array:
    x = dtypes.widen(x)
    return x * lax.tanh(jnp.logaddexp(x, jnp.zeros_like(x)))


@lowers("aten.mish_backward.default")
def _mish_backward(ctx: Context, grad: jax.Array, x: jax.Array) -> jax.Array:
    grad, x = dtypes.promote(grad, x)
    gate = lax.tanh(jnp.logaddexp(x, jnp.zeros_like(x)))
    return grad * (gate + x * lax.logistic(x) * (1 - gate * gate))


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


@lowers("aten.glu.default")
def _glu(ctx: Context, x: jax.Array, dim: int) -> jax.Array:
    value, gate = jnp.split(dtypes.widen(x), 2, axis=dim)
    return value * lax.logistic(gate)


@lowers("aten.glu_backward.default")
def _glu_backward(ctx: Context, grad: jax.Array, x: jax.Array, dim: int) -> jax.Array:
    value, gate = jnp.split(dtypes.widen(x), 2, axis=dim)
    grad, gate = dtypes.widen(grad), lax.logistic(gate)
    return jnp.concatenate([grad * gate, grad * value * gate * (1 - gate)], axis=dim)


@lowers("aten.sigmoid_backward.default")
def _sigmoid_backward(ctx: Context, grad: jax.Array, y: jax.Array) -> jax.Array:
    grad, y = dtypes.promote(grad, y)
    return grad * jnp.conj((1 - y) * y)


@lowers("aten.tanh_backward.default")
def _tanh_backward(ctx: Context, grad: jax.Array, y: jax.Array) -> jax.Array:
    grad, y = dtypes.promote(grad, y)
    slope = subtract(lax.full_like(y, 1), multiply(y, y))
    return multiply(grad, lax.conj(slope) if dtypes.is_complex(slope) else slope)


@lowers("aten.logit.default")
def _logit(ctx: Context, x: jax.Array, eps: float | None) -> jax.Array:
    x = dtypes.widen(x, floating=True)
    if eps is not None:
        x = jnp.where(x < eps, eps, jnp.where(x > 1 - eps, 1 - eps, x))  # in this order, where eps is over 0.5
    return lax.log(x / (1 - x))


@lowers("aten.logit_backward.default")
def _logit_backward(ctx: Context, grad: jax.Array, x: jax.Array, eps: float | None) -> jax.Array:
    grad, x = dtypes.promote(grad, x)
    slope = grad / (x * (1 - x))
    if eps is None:
        return jnp.where((x < 0) | (x > 1), jnp.full_like(x, math.nan), slope)
    return jnp.where((x < eps) | (x > 1 - eps), jnp.zeros_like(x), slope)


# Softmax family.


@lowers("aten._softmax.default")
def _softmax(ctx: Context, x: jax.Array, dim: int, half_to_float: bool) -> jax.Array:
    x = dtypes.widen(x)
    if x.ndim == 0 or x.size == 0:
        return x * 0 + 1
    weights = lax.exp(x - lax.stop_gradient(jnp.max(x, axis=dim, keepdims=True)))
    return weights / jnp.sum(weights, axis=dim, keepdims=True)


@lowers("aten._safe_softmax.default")
def _safe_softmax(ctx: Context, x: jax.Array, dim: int, dtype: Any) -> jax.Array:
    """As softmax, but a row of only -inf gives zeros."""
    x = dtypes.cast(x, dtypes.opmath(ctx.meta.dtype))
    masked = jnp.all(x == -math.inf, axis=dim, keepdims=True) if x.ndim else x == -math.inf
    return jnp.where(masked, jnp.zeros_like(x), _softmax(ctx, x, dim, False))


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
