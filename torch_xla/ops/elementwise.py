"""Elementwise operators of two and three tensors: arithmetic, comparison, logic, bits, selection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_xla.ops import dtypes
from torch_xla.ops.args import is_constant, scale
from torch_xla.ops.arithmetic import add, multiply, select, subtract
from torch_xla.ops.division import divide
from torch_xla.ops.registry import Context, NumberInput, Rule, lowers

Binary = Callable[[jax.Array, jax.Array], jax.Array]


def binary(fn: Binary, floating: bool = False) -> Rule:
    """A rule of two operands, promoted and broadcast by PyTorch's rules: `fn` has arrays of equal shape and dtype."""

    def rule(ctx: Context, x: Any, y: Any) -> jax.Array:
        return fn(*dtypes.promote(x, y, floating=floating))

    return rule


# Addition and division.


def _scaled(ctx: Context, x: Any, y: Any, alpha: Any) -> list[jax.Array]:
    """Both operands, the second times a number."""
    x, y = dtypes.promote(x, y)
    factor = None if is_constant(alpha, 1) else dtypes.cast(dtypes.rounded(alpha, ctx.meta.dtype), dtypes.dtype_of(y))
    return [x, y if factor is None else multiply(y, factor)]


@lowers("aten.add.Tensor", "aten.add.Scalar")
def _add(ctx: Context, x: Any, y: Any, alpha: Any) -> jax.Array:
    return add(*_scaled(ctx, x, y, alpha))


@lowers("aten._add_relu.Tensor")
def _add_relu(ctx: Context, x: Any, y: Any, *, alpha: Any) -> jax.Array:
    return jax.nn.relu(_add(ctx, x, y, alpha=alpha))


@lowers("aten.sub.Tensor", "aten.sub.Scalar")
def _sub(ctx: Context, x: Any, y: Any, alpha: Any) -> jax.Array:
    return subtract(*_scaled(ctx, x, y, alpha))


@lowers("aten.rsub.Tensor", "aten.rsub.Scalar")
def _rsub(ctx: Context, x: Any, y: Any, alpha: Any) -> jax.Array:
    return _sub(ctx, y, x, alpha=alpha)


def _floor_divide(x: jax.Array, y: jax.Array) -> jax.Array:
    remainder = lax.rem(x, y)
    crosses = (remainder != 0) & ((remainder < 0) != (y < 0))
    if not dtypes.is_floating(x):
        quotient = lax.div(x, y)
        return jnp.where(crosses, quotient - 1, quotient) if jnp.issubdtype(x.dtype, jnp.signedinteger) else quotient
    # The quotient of what is left after the remainder is a whole number up to rounding; make it one.
    quotient = (x - remainder) / y
    quotient = jnp.where(crosses, quotient - 1, quotient)
    floor = lax.floor(quotient)
    floor = jnp.where(quotient - floor > 0.5, floor + 1, floor)
    signed_zero = jnp.copysign(jnp.zeros_like(x), x / y)
    return jnp.where(y == 0, x / y, jnp.where(quotient == 0, signed_zero, floor))


def _whole_part(x: jax.Array, y: jax.Array, dtype: torch.dtype) -> jax.Array:
    quotient = divide(x, y)
    if dtype in (torch.float16, torch.bfloat16) and y.size != 1:
        # Rounded to the result's type before it is cut, unless there is one divisor for all.
        quotient = dtypes.rounded(quotient, dtype)
    return jnp.trunc(quotient)


def _remainder(x: jax.Array, y: jax.Array) -> jax.Array:
    remainder = lax.rem(x, y)
    return jnp.where((remainder != 0) & ((remainder < 0) != (y < 0)), remainder + y, remainder)


@lowers("aten.div.Tensor", "aten.div.Scalar")
def _div(ctx: Context, x: Any, y: Any) -> jax.Array:
    return divide(*dtypes.convert(x, y, floating=True))


@lowers("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def _div_mode(ctx: Context, x: Any, y: Any, *, rounding_mode: str | None) -> jax.Array:
    if rounding_mode is None:
        return _div(ctx, x, y)
    if rounding_mode == "floor":
        return _div_floor(ctx, x, y)
    x, y = dtypes.convert(x, y)
    if ctx.meta.dtype.is_floating_point:
        return _whole_part(x, y, ctx.meta.dtype)
    if x.dtype == jnp.bool_:
        x, y = x.astype(jnp.int8), y.astype(jnp.int8)
    return lax.div(*jnp.broadcast_arrays(x, y))


@lowers("aten.floor_divide.default", "aten.floor_divide.Scalar")
def _div_floor(ctx: Context, x: Any, y: Any) -> jax.Array:
    x, y = jnp.broadcast_arrays(*dtypes.convert(x, y))
    if x.dtype == jnp.bool_:
        x, y = x.astype(jnp.int8), y.astype(jnp.int8)
    return _floor_divide(x, y)


@lowers("aten.mul.Tensor", "aten.mul.Scalar")
def _mul(ctx: Context, x: Any, y: Any) -> jax.Array:
    return multiply(*dtypes.convert(x, y))


# Powers.


def _integer_power(x: jax.Array, y: jax.Array) -> jax.Array:
    """Wrapping power by repeated squaring; a negative exponent leaves only the powers of 1 and -1."""
    one, zero = jnp.ones_like(x), jnp.zeros_like(x)

    def step(bit: Any, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        result, square = carry
        odd = (lax.shift_right_logical(y, jnp.full_like(y, bit)) & one) == one
        return jnp.where(odd, result * square, result), square * square

    result, _ = lax.fori_loop(0, x.dtype.itemsize * 8 - 1, step, (one, x))
    if not jnp.issubdtype(x.dtype, jnp.signedinteger):
        return result
    negative = jnp.where(x == one, one, jnp.where(x == -one, jnp.where(y & one == one, -one, one), zero))
    return jnp.where(y < 0, negative, result)


def _power(x: jax.Array, y: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        return x | ~y
    return lax.pow(x, y) if jnp.issubdtype(x.dtype, jnp.inexact) else _integer_power(x, y)


@lowers("aten.pow.Tensor_Scalar")
def _pow_scalar(ctx: Context, x: jax.Array, exponent: Any) -> jax.Array:
    given, dtype = x, dtypes.compute_type(x, exponent)
    x = dtypes.cast(x, dtype)
    # The common exponents become products and roots, which is what PyTorch's kernel does.
    if jnp.issubdtype(x.dtype, jnp.inexact) and not isinstance(exponent, (complex, NumberInput)):
        if abs(exponent) == 0.5:
            return lax.sqrt(x) if exponent > 0 else lax.rsqrt(x)
        if abs(exponent) <= 4 and exponent == int(exponent):
            return lax.integer_pow(x, int(exponent))
    return _power(*dtypes.broadcast(x, dtypes.rounded(exponent, dtypes.result_type(given, exponent)), dtype=dtype))


# Comparison and choice.


def _truth(x: Any) -> jax.Array:
    return x != 0 if x.dtype != jnp.bool_ else x


def _fmax(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.where(x != x, y, jnp.where(y != y, x, lax.max(x, y)))


def _fmin(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.where(x != x, y, jnp.where(y != y, x, lax.min(x, y)))


def _xlogy(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.where(y != y, y, jnp.where(x == 0, jnp.zeros_like(x), x * lax.log(y)))


def _xlog1py(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.where(y != y, y, jnp.where(x == 0, jnp.zeros_like(x), x * lax.log1p(y)))


def _right_shift(x: jax.Array, y: jax.Array) -> jax.Array:
    signed = jnp.issubdtype(x.dtype, jnp.signedinteger)
    return lax.shift_right_arithmetic(x, y) if signed else lax.shift_right_logical(x, y)


def logaddexp(x: jax.Array, y: jax.Array) -> jax.Array:
    """``log(exp(x) + exp(y))``; of complex numbers without folding the result's angle into one turn."""
    if not dtypes.is_complex(x):
        return jnp.logaddexp(x, y)
    first = x.real >= y.real
    high, low = jnp.where(first, x, y), jnp.where(first, y, x)
    same_infinity = (x == y) & ~jnp.isfinite(x.real)
    return jnp.where(same_infinity, x, high + jnp.log1p(lax.exp(low - high)))


_TENSOR_SCALAR = ("Tensor", "Scalar")
_BITWISE = ("Tensor", "Scalar", "Scalar_Tensor")
_SHIFT = ("Tensor", "Tensor_Scalar", "Scalar_Tensor")
_DEFAULT = ("default",)

# Name, overloads, function: the operands arrive promoted.
_PROMOTED: tuple[tuple[str, tuple[str, ...], Binary], ...] = (
    ("__lshift__", _TENSOR_SCALAR, lax.shift_left),
    ("__rshift__", _TENSOR_SCALAR, _right_shift),
    ("bitwise_and", _BITWISE, lax.bitwise_and),
    ("bitwise_left_shift", _SHIFT, lax.shift_left),
    ("bitwise_or", _BITWISE, lax.bitwise_or),
    ("bitwise_right_shift", _SHIFT, _right_shift),
    ("bitwise_xor", _BITWISE, lax.bitwise_xor),
    ("clamp_max", ("default", "Tensor"), lax.min),
    ("clamp_min", ("default", "Tensor"), lax.max),
    ("eq", _TENSOR_SCALAR, lax.eq),
    ("fmax", _DEFAULT, _fmax),
    ("fmin", _DEFAULT, _fmin),
    ("fmod", _TENSOR_SCALAR, lax.rem),
    ("gcd", _DEFAULT, jnp.gcd),
    ("ge", _TENSOR_SCALAR, lax.ge),
    ("gt", _TENSOR_SCALAR, lax.gt),
    ("lcm", _DEFAULT, jnp.lcm),
    ("le", _TENSOR_SCALAR, lax.le),
    ("logical_and", _DEFAULT, lambda x, y: _truth(x) & _truth(y)),
    ("logical_or", _DEFAULT, lambda x, y: _truth(x) | _truth(y)),
    ("logical_xor", _DEFAULT, lambda x, y: _truth(x) ^ _truth(y)),
    ("lt", _TENSOR_SCALAR, lax.lt),
    ("maximum", _DEFAULT, lax.max),
    ("minimum", _DEFAULT, lax.min),
    ("ne", _TENSOR_SCALAR, lax.ne),
    ("pow", ("Tensor_Tensor", "Scalar"), _power),
    ("remainder", ("Tensor", "Scalar", "Scalar_Tensor"), _remainder),
)
for _name, _overloads, _fn in _PROMOTED:
    lowers(*(f"aten.{_name}.{overload}" for overload in _overloads))(binary(_fn))

# The same for operators that promote integers to the default float type.
_FLOATING: tuple[tuple[str, tuple[str, ...], Binary], ...] = (
    ("atan2", _DEFAULT, lax.atan2),
    ("copysign", _TENSOR_SCALAR, jnp.copysign),
    ("hypot", _DEFAULT, jnp.hypot),
    ("logaddexp", _DEFAULT, logaddexp),
    ("logaddexp2", _DEFAULT, jnp.logaddexp2),
    ("special_xlog1py", ("default", "other_scalar", "self_scalar"), _xlog1py),
    ("xlogy", ("Tensor", "Scalar_Other", "Scalar_Self"), _xlogy),
)
for _name, _overloads, _fn in _FLOATING:
    lowers(*(f"aten.{_name}.{overload}" for overload in _overloads))(binary(_fn, floating=True))


@lowers("aten.ldexp.Tensor")
def _ldexp(ctx: Context, x: jax.Array, y: jax.Array) -> jax.Array:
    given = dtypes.dtype_of(x)
    if dtypes.is_floating(x) and not jnp.issubdtype(y.dtype, jnp.inexact):  # rounded once; the kernel counts in int32
        wide = dtypes.widen(x)
        return jnp.ldexp(*jnp.broadcast_arrays(wide, y.astype(jnp.int32)))
    # A product with a power, which is rounded, or overflows, in its own type.
    two = jnp.asarray(2, dtypes.numpy_dtype(given if given.is_floating_point else torch.float32))
    dtype = dtypes.result_type(2.0 if given == torch.float32 else two, y)
    return multiply(*dtypes.promote(x, dtypes.cast(lax.pow(*dtypes.promote(two, y)), dtype)))


@lowers("aten.nextafter.default")
def _nextafter(ctx: Context, x: jax.Array, y: jax.Array) -> jax.Array:
    # The neighbour depends on the type, so half types are not widened.
    return lax.nextafter(*dtypes.broadcast(x, y, dtype=dtypes.result_type(x, y)))


@lowers("aten.clamp.default", "aten.clamp.Tensor")
def _clamp(ctx: Context, x: jax.Array, low: Any, high: Any) -> jax.Array:
    dtype = dtypes.result_type(x, low, high)
    if low is not None:
        x = lax.max(*dtypes.broadcast(x, low, dtype=dtype))
    if high is not None:
        x = lax.min(*dtypes.broadcast(x, high, dtype=dtype))
    return x


@lowers("aten.where.self")
def _where(ctx: Context, condition: jax.Array, x: Any, y: Any) -> jax.Array:
    x, y = dtypes.broadcast(x, y, dtype=dtypes.result_type(x, y))
    return select(_truth(condition), x, y)


@lowers("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def _masked_fill(ctx: Context, x: jax.Array, mask: jax.Array, value: Any) -> jax.Array:
    return select(_truth(mask), dtypes.cast(value, dtypes.dtype_of(x)), x)


# Three operands.


@lowers("aten.lerp.Scalar", "aten.lerp.Tensor")
def _lerp(ctx: Context, start: jax.Array, end: jax.Array, weight: Any) -> jax.Array:
    # Two formulas, so that weights 0 and 1 give the ends exactly.
    start, end, weight = dtypes.broadcast(start, end, weight, dtype=dtypes.compute_type(start, end))
    step = lax.sub(end, start)
    size = lax.abs(weight)
    near_start = lax.lt(size, lax.full_like(size, 0.5))
    rest = lax.sub(lax.full_like(weight, 1), weight)
    return lax.select(near_start, lax.add(start, lax.mul(weight, step)), lax.sub(end, lax.mul(step, rest)))


@lowers("aten.addcmul.default")
def _addcmul(ctx: Context, x: jax.Array, a: jax.Array, b: jax.Array, *, value: Any) -> jax.Array:
    x, a, b = dtypes.promote(x, a, b)
    return add(x, multiply(scale(a, value), b))


@lowers("aten.addcdiv.default")
def _addcdiv(ctx: Context, x: jax.Array, a: jax.Array, b: jax.Array, *, value: Any) -> jax.Array:
    x, a, b = dtypes.convert(x, a, b, floating=True)
    return add(x, divide(scale(a, value), b))
