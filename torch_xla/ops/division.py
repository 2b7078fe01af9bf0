"""Quotients as PyTorch rounds them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from torch_xla.ops import dtypes


def divide(x: jax.Array, y: Any) -> jax.Array:
    """``x / y``, rounded once.

    XLA multiplies by the reciprocal of a divisor that is constant or broadcast, so that 41 / 41 is 0.99999994 and its
    whole part 0. It leaves a divisor alone that depends on the dividend; where that is NaN, any gives the same.

    Args:
        x: Real or complex floating-point values.
        y: Divisors of the same type that broadcast to the shape of `x`.
    """
    if dtypes.is_complex(x):
        return x / y
    return x / jnp.where(x != x, x, y)


def mean(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """The mean over some dimensions, which are kept. That of equal values is their value."""
    total = jnp.sum(x, axis=tuple(axes), keepdims=True)
    return divide(total, x.size // max(total.size, 1))
