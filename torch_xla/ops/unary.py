"""Elementwise operators of one tensor: arithmetic, rounding, predicates, complex parts, copies and conversions."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from torch_xla.ops import dtypes, host_kernel
from torch_xla.ops.division import divide
from torch_xla.ops.registry import Context, Rule, lowers

Unary = Callable[[jax.Array], jax.Array]


def floating(fn: Unary) -> Rule:
    """A rule that promotes integers to the default float type and computes half types in float32."""

    def rule(ctx: Context, x: jax.Array) -> jax.Array:
        return fn(dtypes.widen(x, floating=True))

    return rule


def plain(fn: Unary) -> Rule:
    """A rule that hands the operand over in its own type."""

    def rule(ctx: Context, x: jax.Array) -> jax.Array:
        return fn(x)

    return rule


def _sinc(x: jax.Array) -> jax.Array:
    scaled = x * math.pi
    return jnp.where(x == 0, jnp.ones_like(x), jnp.sin(scaled) / jnp.where(x == 0, jnp.ones_like(x), scaled))


def _exp2(x: jax.Array) -> jax.Array:
    # XLA's own is an exponential of a product on CPUs, and no power of two is exact.
    return lax.exp2(x) if dtypes.is_complex(x) else lax.pow(lax.full_like(x, 2), x)


def _called(fn: Unary) -> Unary:
    """A function that XLA:CPU calls the C library for, value by value."""
    return lambda x: host_kernel.once(fn(x))


# Operators whose result is floating point: one line each.
_FLOATING: dict[str, Unary] = {
    "acos": jnp.arccos,
    "acosh": jnp.arccosh,
    "asin": jnp.arcsin,
    "asinh": jnp.arcsinh,
    "atan": jnp.arctan,
    "atanh": jnp.arctanh,
    "cos": _called(lax.cos),
    "cosh": lax.cosh,
    "deg2rad": lambda x: x * (math.pi / 180.0),
    "exp": lax.exp,
    "exp2": _exp2,
    "expm1": lax.expm1,
    "log": lax.log,
    "log10": jnp.log10,
    "log1p": lax.log1p,
    "log2": jnp.log2,
    "rad2deg": lambda x: x * (180.0 / math.pi),
    "reciprocal": lambda x: 1 / x,
    "rsqrt": lax.rsqrt,
    "sigmoid": lambda x: 1 / (1 + lax.exp(-x)) if dtypes.is_complex(x) else lax.logistic(x),
    "sin": _called(lax.sin),
    "sinc": _sinc,
    "sinh": lax.sinh,
    "sqrt": lax.sqrt,
    "tan": lax.tan,
    "tanh": lax.tanh,
}
for _name, _fn in _FLOATING.items():
    lowers(f"aten.{_name}.default")(floating(_fn))


def _rounding(fn: Unary) -> Unary:
    return lambda x: fn(x) if dtypes.is_floating(x) else x


def _sign(x: jax.Array) -> jax.Array:
    # jnp.sign keeps NaN; PyTorch gives 0.
    if x.dtype == jnp.bool_:
        return x
    return (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype)


def _sgn(x: jax.Array) -> jax.Array:
    if not dtypes.is_complex(x):
        return _sign(x)
    size = lax.abs(x)
    return jnp.where(size == 0, jnp.zeros_like(x), x / jnp.where(size == 0, jnp.ones_like(size), size))


def _abs(x: jax.Array) -> jax.Array:
    return x if x.dtype == jnp.bool_ or jnp.issubdtype(x.dtype, jnp.unsignedinteger) else lax.abs(x)


def _isinf(x: jax.Array) -> jax.Array:
    if dtypes.is_complex(x):
        return _isinf(x.real) | _isinf(x.imag)
    return lax.abs(x) == math.inf if dtypes.is_floating(x) else jnp.zeros(x.shape, bool)


def _is_value(value: float) -> Unary:
    return lambda x: x == value if dtypes.is_floating(x) else jnp.zeros(x.shape, bool)


# Operators that keep the operand's type, or answer with a bool.
_PLAIN: dict[str, Unary] = {
    "abs": _abs,
    "bitwise_not": lax.bitwise_not,
    "ceil": _rounding(lax.ceil),
    "floor": _rounding(lax.floor),
    "frac": lambda x: x - lax.sign(x) * lax.floor(lax.abs(x)),
    "isinf": _isinf,
    "isnan": lambda x: x != x,
    "isneginf": _is_value(-math.inf),
    "isposinf": _is_value(math.inf),
    "logical_not": lambda x: x == 0,
    "neg": lax.neg,
    "relu": lambda x: lax.max(x, jnp.zeros_like(x)),
    "round": _rounding(lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)),
    "sgn": _sgn,
    "sign": _sign,
    "signbit": lambda x: jnp.signbit(x) if dtypes.is_floating(x) else x < jnp.zeros_like(x),
    "trunc": _rounding(jnp.trunc),
}
for _name, _fn in _PLAIN.items():
    lowers(f"aten.{_name}.default")(plain(_fn))


@lowers("aten.round.decimals")
def _round_decimals(ctx: Context, x: jax.Array, *, decimals: int) -> jax.Array:
    if not dtypes.is_floating(x):
        return x
    wide = dtypes.widen(x)
    scale = 10.0 ** abs(decimals)
    if decimals < 0:
        return lax.round(divide(wide, scale), lax.RoundingMethod.TO_NEAREST_EVEN) * scale
    return divide(lax.round(wide * scale, lax.RoundingMethod.TO_NEAREST_EVEN), scale)


@lowers("aten.nan_to_num.default")
def _nan_to_num(ctx: Context, x: jax.Array, nan: float | None, posinf: float | None, neginf: float | None) -> jax.Array:
    if dtypes.is_complex(x):
        return lax.complex(_nan_to_num(ctx, x.real, nan, posinf, neginf), _nan_to_num(ctx, x.imag, nan, posinf, neginf))
    if not dtypes.is_floating(x):
        return x
    limits = jnp.finfo(x.dtype)

    def value(number: Any, default: Any) -> jax.Array:
        return jnp.asarray(default, x.dtype) if number is None else dtypes.cast(number, dtypes.dtype_of(x))

    result = jnp.where(x == math.inf, value(posinf, limits.max), x)
    result = jnp.where(x == -math.inf, value(neginf, limits.min), result)
    return jnp.where(x != x, value(nan, 0), result)


@lowers("aten.frexp.Tensor")
def _frexp(ctx: Context, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    mantissa, exponent = jnp.frexp(dtypes.widen(x))
    return mantissa, exponent


# Complex numbers.


@lowers("aten.angle.default")
def _angle(ctx: Context, x: jax.Array) -> jax.Array:
    x = dtypes.widen(x, floating=True)
    if dtypes.is_complex(x):
        return lax.atan2(x.imag, x.real)
    return jnp.where(x != x, x, jnp.where(x < 0, jnp.asarray(math.pi, x.dtype), jnp.zeros_like(x)))


@lowers("aten.complex.default")
def _complex(ctx: Context, real: jax.Array, imag: jax.Array) -> jax.Array:
    return lax.complex(*dtypes.promote(real, imag))


@lowers("aten.polar.default")
def _polar(ctx: Context, size: jax.Array, angle: jax.Array) -> jax.Array:
    size, angle = dtypes.promote(size, angle)
    return lax.complex(size * lax.cos(angle), size * lax.sin(angle))


# Copies. The cast to the result's dtype does the conversion.


@lowers("aten.clone.default", "aten._to_copy.default", "prims.convert_element_type.default")
def _identity(ctx: Context, x: jax.Array, *_: Any, **__: Any) -> jax.Array:
    return x


@lowers("aten.copy.default")
def _copy(ctx: Context, x: jax.Array, source: jax.Array, non_blocking: bool) -> jax.Array:
    return jnp.broadcast_to(source, x.shape)


@lowers("aten.fill.Scalar", "aten.fill.Tensor")
def _fill(ctx: Context, x: jax.Array, value: Any) -> jax.Array:
    return jnp.broadcast_to(dtypes.cast(value, ctx.meta.dtype), ctx.meta.shape)


@lowers("aten.zero.default")
def _zero(ctx: Context, x: jax.Array) -> jax.Array:
    return jnp.zeros(ctx.meta.shape, dtypes.numpy_dtype(ctx.meta.dtype))
