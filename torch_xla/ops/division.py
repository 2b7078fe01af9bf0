"""Quotients as PyTorch rounds them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from torch_xla.ops import dtypes, host_kernel
from torch_xla.ops.arithmetic import multiply, select, total


def divide(x: jax.Array, y: Any) -> jax.Array:
    """``x / y``, rounded once, of floating-point values and divisors of the same type or a number.

    XLA multiplies by the reciprocal of a divisor that is constant or broadcast, so that 41 / 41 is 0.99999994 and its
    whole part 0.
    """
    y = jnp.asarray(y, x.dtype)
    if dtypes.is_complex(x):
        return x / y
    size = math.prod(jnp.broadcast_shapes(x.shape, y.shape))
    if x.dtype != jnp.float32 or (size != 1 and size == math.prod(y.shape)):
        return _kept_apart(x, y)
    if host_kernel.in_use():  # known to run on a CPU, so the other way need not be traced
        return _in_double(x, y)
    return lax.platform_dependent(x, y, cpu=_in_double, default=_kept_apart)


def _kept_apart(x: jax.Array, y: jax.Array) -> jax.Array:
    # XLA leaves a divisor alone that depends on the dividend; where that is NaN, any gives the same.
    divisor = select(lax.ne(x, x), x, y)
    return lax.div(jnp.broadcast_to(x, divisor.shape), divisor)


def _in_double(x: jax.Array, y: jax.Array) -> jax.Array:
    # No quotient of 24-bit numbers is as near to the middle of two others as the errors of this product are large. And
    # XLA keeps what a division gives in memory if it is used twice, but not what a product gives.
    wide = y.astype(jnp.float64)
    reciprocal = lax.div(jnp.ones_like(wide), wide)
    return multiply(x.astype(jnp.float64), reciprocal).astype(jnp.float32)


def mean(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """The mean over some dimensions, which are kept. That of equal values is their value."""
    summed = total(x, axes, keepdims=True)
    return divide(summed, x.size // max(summed.size, 1))
