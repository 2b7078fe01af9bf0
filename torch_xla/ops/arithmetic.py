"""Arithmetic of the most frequent rules, in single primitives.

The operators of JAX arrays and the functions of `jax.numpy` are jitted one by one. In a rule, each is a function that
is traced and lowered again for every shape, 0.4 ms a time, and inlined by XLA in the end.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torch_xla.ops import dtypes


def _fitted(*arrays: jax.Array) -> list[jax.Array]:
    shape = jnp.broadcast_shapes(*(x.shape for x in arrays))
    return [x if x.shape == shape else jnp.broadcast_to(x, shape) for x in arrays]


def add(x: jax.Array, y: jax.Array) -> jax.Array:
    """``x + y`` of arrays of one type; of booleans, whether one is true."""
    x, y = _fitted(x, y)
    return lax.bitwise_or(x, y) if x.dtype == np.bool_ else lax.add(x, y)


def subtract(x: jax.Array, y: jax.Array) -> jax.Array:
    """``x - y`` of arrays of one type, which are no booleans."""
    return lax.sub(*_fitted(x, y))


def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
    """``x * y`` of arrays of one type; of booleans, whether both are true."""
    x, y = _fitted(x, y)
    return lax.bitwise_and(x, y) if x.dtype == np.bool_ else lax.mul(x, y)


def select(condition: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """`x` where a condition holds, else `y`, which has the same type."""
    return lax.select(*_fitted(condition, x, y))


def total(x: jax.Array, axes: Sequence[int], keepdims: bool = False) -> jax.Array:
    """The sum over some dimensions, counted from the front, in the type of `x`, which is no boolean.

    Half types are summed up in float32.
    """
    result = dtypes.cast(lax.reduce_sum(dtypes.widen(x), tuple(axes)), dtypes.dtype_of(x))
    return lax.expand_dims(result, tuple(axes)) if keepdims else result
