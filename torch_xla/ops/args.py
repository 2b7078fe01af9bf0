"""Small helpers over operator arguments that several rule families share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from torch_xla.ops import dtypes
from torch_xla.ops.arithmetic import multiply
from torch_xla.ops.registry import NumberInput


def axis(dim: int, ndim: int) -> int:
    """A dimension counted from the front; a 0-d tensor has one dimension for this purpose, as in PyTorch."""
    return dim % max(ndim, 1)


def axes(dims: int | Iterable[int] | None, ndim: int) -> tuple[int, ...]:
    """Dimensions counted from the front; None means all of them."""
    if dims is None:
        return tuple(range(ndim))
    if isinstance(dims, int):
        dims = (dims,)
    return tuple(axis(d, ndim) for d in dims)


def ints(value: int | Sequence[int] | None, n: int, default: Sequence[int] | None = None) -> tuple[int, ...]:
    """An ``int[n]`` argument: a single value is repeated, and an absent or empty one is `default`."""
    if isinstance(value, int):
        return (value,) * n
    if not value:
        assert default is not None, "an int list without a default is empty"
        return tuple(default)
    return tuple(value) * n if len(value) == 1 else tuple(value)


def clamp_slice(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    """Start and end of a slice over a dimension of `size`, with ``start <= end`` and both inside ``[0, size]``."""
    start = 0 if start is None else start
    end = size if end is None else end
    start = min(max(start + size if start < 0 else start, 0), size)
    end = min(max(end + size if end < 0 else end, start), size)
    return start, end


def is_constant(number: Any, value: int) -> bool:
    """Whether a `Scalar` argument is a Python number known to equal `value` (a program input never is)."""
    return not isinstance(number, NumberInput) and number == value


def scale(x: jax.Array, number: Any) -> jax.Array:
    """``number * x`` in the dtype of `x`; no multiply when the number is the constant 1."""
    if is_constant(number, 1):
        return x
    return multiply(x, dtypes.cast(number, dtypes.torch_dtype(x.dtype)))


def along(values: jax.Array, dim: int, ndim: int) -> jax.Array:
    """A vector shaped to broadcast along dimension `dim` of an `ndim`-dimensional array."""
    shape = [1] * ndim
    shape[dim] = -1
    return jnp.reshape(values, shape)
