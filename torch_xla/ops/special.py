"""Special functions: error functions, gamma family, Bessel functions."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy import special

from torch_xla.ops import dtypes
from torch_xla.ops.elementwise import Binary, binary
from torch_xla.ops.registry import Context, lowers
from torch_xla.ops.unary import Unary, floating


def _digamma(x: jax.Array) -> jax.Array:
    # A pole whose sign depends on the sign of zero; XLA gives NaN.
    return jnp.where(x == 0, jnp.copysign(jnp.full_like(x, math.inf), -x), lax.digamma(x))


def _entropy(x: jax.Array) -> jax.Array:
    safe = jnp.where(x > 0, x, jnp.ones_like(x))
    below = jnp.where(x < 0, jnp.full_like(x, -math.inf), jnp.where(x == 0, jnp.zeros_like(x), x))
    return jnp.where(x > 0, -x * lax.log(safe), below)


def _zeta(order: jax.Array, x: jax.Array) -> jax.Array:
    """Hurwitz zeta function. Left of 0, where XLA loses accuracy, terms are added until the rest lies right of it."""

    def below(x: jax.Array) -> jax.Array:
        # Far left every step would be lost to rounding.
        return (x < 0) & (x > -(2.0**20))

    def step(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        total, x = carry
        term = jnp.where(below(x), lax.pow(x, -order), jnp.zeros_like(x))
        return total + term, jnp.where(below(x), x + 1, x)

    total, rest = lax.while_loop(lambda carry: jnp.any(below(carry[1])), step, (jnp.zeros_like(x), x))
    infinite = (order == 1) | ((order > 1) & (x <= 0) & (x == lax.floor(x)))
    undefined = (order < 1) | ((x < 0) & (order != lax.floor(order)))
    # Far right the terms underflow, or are infinite, where their sum is not.
    far = lax.pow(rest, 1 - order) / (order - 1) + lax.pow(rest, -order) / 2
    value = total + jnp.where(rest > 2.0**27, far, lax.zeta(order, rest))
    value = jnp.where(undefined, jnp.full_like(x, math.nan), value)
    return jnp.where(infinite, jnp.full_like(x, math.inf), value)


def _at_limits(zero: float, one: float, fn: Binary) -> Binary:
    """An incomplete gamma function, with its values where its series has none: `zero` at 0, `one` at infinity."""

    def limited(a: jax.Array, x: jax.Array) -> jax.Array:
        value = jnp.where(x == 0, zero, jnp.where((a == 0) | (x == math.inf), one, fn(a, x)))
        value = jnp.where((a == math.inf) & (x != 0), jnp.where(x == math.inf, math.nan, zero), value)
        undefined = (x < 0) | (a < 0) | ((a == 0) & ~(x > 0)) | (x != x) | ((a != a) & (x != 0))
        return jnp.where(undefined, math.nan, value).astype(a.dtype)

    return limited


def _spherical_j0(x: jax.Array) -> jax.Array:
    quotient = jnp.where(x == 0, jnp.ones_like(x), lax.sin(x) / jnp.where(x == 0, jnp.ones_like(x), x))
    return jnp.where(jnp.isinf(x), jnp.zeros_like(x), quotient)


_FLOATING: dict[str, Unary] = {
    "digamma": _digamma,
    "erf": lax.erf,
    "erfc": lax.erfc,
    "erfinv": lax.erf_inv,
    "i0": special.i0,
    "lgamma": lax.lgamma,
    "special_entr": _entropy,
    "special_i0e": lax.bessel_i0e,
    "special_i1": special.i1,
    "special_i1e": lax.bessel_i1e,
    "special_log_ndtr": special.log_ndtr,
    "special_spherical_bessel_j0": _spherical_j0,
    "special_modified_bessel_i0": special.i0,
    "special_modified_bessel_i1": special.i1,
    "special_ndtri": special.ndtri,
}
for _name, _fn in _FLOATING.items():
    lowers(f"aten.{_name}.default")(floating(_fn))

lowers("aten.igamma.default")(binary(_at_limits(0.0, 1.0, lax.igamma), floating=True))
lowers("aten.igammac.default")(binary(_at_limits(1.0, 0.0, lax.igammac), floating=True))
lowers("aten.special_zeta.default", "aten.special_zeta.other_scalar", "aten.special_zeta.self_scalar")(
    binary(_zeta, floating=True)
)


@lowers("aten.polygamma.default")
def _polygamma(ctx: Context, order: int, x: jax.Array) -> Any:
    x = dtypes.widen(x, floating=True)
    if order == 0:
        return _digamma(x)
    if order == 1:
        # Reflection for the negative half line, where the series does not converge.
        reflected = jnp.where(x < 0.5, 1 - x, x)
        positive = _zeta(jnp.full_like(x, 2), reflected)
        return jnp.where(x < 0.5, (math.pi / lax.sin(math.pi * x)) ** 2 - positive, positive)
    sign = -1.0 if order % 2 == 0 else 1.0
    return sign * math.factorial(order) * _zeta(jnp.full_like(x, order + 1), x)
