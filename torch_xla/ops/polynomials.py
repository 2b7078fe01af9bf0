"""Rules for orthogonal polynomials, by their recurrences over the degree, which is data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torch_xla.ops import dtypes
from torch_xla.ops.registry import Context, lowers

Start = Callable[[jax.Array], jax.Array]
# From the degree k, the argument and the polynomials of degrees k - 1 and k - 2: the one of degree k.
Step = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def _polynomial(x: jax.Array, degree: jax.Array, first: Start, step: Step) -> jax.Array:
    """The polynomial of each element's degree; 0 for negative degrees."""
    most = jnp.max(degree, initial=0)

    def unfinished(carry: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        k, _, now = carry
        return jnp.logical_and(k <= most, ~jnp.all(jnp.isnan(now)))

    def advance(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        k, before, now = carry
        following = step(k.astype(x.dtype), x, now, before)
        active = k <= degree
        return k + 1, jnp.where(active, now, before), jnp.where(active, following, now)

    one = jnp.ones_like(x)
    start = jnp.where(degree == 0, one, first(x))
    value = lax.while_loop(unfinished, advance, (jnp.asarray(2, np.int64), one, start))[2]
    return jnp.where(degree < 0, jnp.zeros_like(x), value)


def _chebyshev(k: jax.Array, x: jax.Array, now: jax.Array, before: jax.Array) -> jax.Array:
    return (x + x) * now - before


def _hermite_h(k: jax.Array, x: jax.Array, now: jax.Array, before: jax.Array) -> jax.Array:
    return (x + x) * now - 2 * (k - 1) * before


def _hermite_he(k: jax.Array, x: jax.Array, now: jax.Array, before: jax.Array) -> jax.Array:
    return x * now - (k - 1) * before


def _laguerre(k: jax.Array, x: jax.Array, now: jax.Array, before: jax.Array) -> jax.Array:
    return ((2 * k - 1 - x) * now - (k - 1) * before) / k


def _legendre(k: jax.Array, x: jax.Array, now: jax.Array, before: jax.Array) -> jax.Array:
    return ((2 * k - 1) * x * now - (k - 1) * before) / k


# By name: the polynomial of degree 1, the recurrence, and the highest degree that PyTorch computes, by the bits of the
# type.
_UNBOUNDED: dict[int, int] = {}
_HERMITE = {32: 128, 64: 512}
_FAMILIES: dict[str, tuple[Start, Step, dict[int, int]]] = {
    "chebyshev_polynomial_t": (lambda x: x, _chebyshev, _UNBOUNDED),
    "chebyshev_polynomial_u": (lambda x: x + x, _chebyshev, _UNBOUNDED),
    "chebyshev_polynomial_v": (lambda x: x + x - 1, _chebyshev, _UNBOUNDED),
    "chebyshev_polynomial_w": (lambda x: x + x + 1, _chebyshev, _UNBOUNDED),
    "hermite_polynomial_h": (lambda x: x + x, _hermite_h, _HERMITE),
    "hermite_polynomial_he": (lambda x: x, _hermite_he, _HERMITE),
    "laguerre_polynomial_l": (lambda x: 1 - x, _laguerre, _UNBOUNDED),
    "legendre_polynomial_p": (lambda x: x, _legendre, _UNBOUNDED),
}


def _register(name: str, first: Start, step: Step, limits: dict[int, int], shifted: bool) -> None:
    @lowers(f"aten.special_{'shifted_' if shifted else ''}{name}.default")
    def rule(ctx: Context, x: Any, n: Any) -> jax.Array:
        x, n = dtypes.promote(x, n, floating=True)
        x, n = jnp.broadcast_arrays(x, n)
        degree = n.astype(np.int64)
        value = _polynomial(x + x - 1 if shifted else x, degree, first, step)
        limit = limits.get(jnp.finfo(x.dtype).bits)
        return value if limit is None else jnp.where(degree > limit, jnp.nan, value)


for _name, (_first, _step, _limits) in _FAMILIES.items():
    _register(_name, _first, _step, _limits, shifted=False)
    if _name.startswith("chebyshev"):
        _register(_name, _first, _step, _limits, shifted=True)
