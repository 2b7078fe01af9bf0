"""Rules for grouped products: each stretch of rows times a matrix of its own, as layers of experts take them.

Where a stretch ends is a value, so one program serves every routing of tokens to experts.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from torch_xla.ops import dtypes
from torch_xla.ops.matmul import contract
from torch_xla.ops.registry import Context, lowers

_BLOCK = 64  # rows that are multiplied at once; the last of a stretch may reach into the next
_CONTRACTED = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)


@lowers("aten._grouped_mm.default")
def _grouped_mm(
    ctx: Context, a: jax.Array, b: jax.Array, ends: jax.Array | None, bias: None, out_dtype: None
) -> jax.Array:
    if ends is None:
        return contract(a, b, ((2,), (1,)), ((0,), (0,)), ctx.meta.dtype)
    if a.ndim == 2 and b.ndim == 2:
        return _each_contracted(a.T, b, ends)
    if a.ndim == 2:
        return _each_times_its_own(a, b, ends)
    return _each_times_its_own(b.T, a.swapaxes(1, 2), ends).T


def _each_times_its_own(x: jax.Array, matrices: jax.Array, ends: jax.Array) -> jax.Array:
    """Rows of `x` times the matrix of their stretch; zeros after the last stretch, where PyTorch leaves what was there.

    JAX multiplies every row by every matrix on CPUs.
    """
    return lax.platform_dependent(x, matrices, ends, cpu=_rows_in_blocks, default=_rows_at_once)


def _each_contracted(x: jax.Array, y: jax.Array, ends: jax.Array) -> jax.Array:
    """For each stretch, the product over its rows of `x` and `y`."""
    return lax.platform_dependent(x, y, ends, cpu=_contracted_in_blocks, default=_contracted_at_once)


def _sizes(ends: jax.Array) -> jax.Array:
    return jnp.diff(ends, prepend=0)


def _rows_at_once(x: jax.Array, matrices: jax.Array, ends: jax.Array) -> jax.Array:
    return lax.ragged_dot(x, matrices, _sizes(ends), preferred_element_type=x.dtype)


def _contracted_at_once(x: jax.Array, y: jax.Array, ends: jax.Array) -> jax.Array:
    return lax.ragged_dot_general(x, y, _sizes(ends), _CONTRACTED, preferred_element_type=x.dtype)


def _rows_in_blocks(x: jax.Array, matrices: jax.Array, ends: jax.Array) -> jax.Array:
    rows = x.shape[0]
    block = min(_BLOCK, rows)
    padded = jnp.pad(x, ((0, block), (0, 0)))
    ends = _ordered(ends, rows)

    def multiply(start: jax.Array, end: jax.Array, stretch: jax.Array, out: jax.Array) -> jax.Array:
        matrix = lax.dynamic_index_in_dim(matrices, stretch, keepdims=False)
        product = contract(_block(padded, start, block), matrix, ((1,), (0,)), dtype=dtypes.torch_dtype(x.dtype))
        return lax.dynamic_update_slice_in_dim(out, product, start, 0)

    out = _walk(ends, block, multiply, jnp.zeros((rows + block, matrices.shape[2]), x.dtype))
    return jnp.where(jnp.arange(rows)[:, None] < ends[-1:], out[:rows], 0)


def _contracted_in_blocks(x: jax.Array, y: jax.Array, ends: jax.Array) -> jax.Array:
    rows = x.shape[0]
    block = min(_BLOCK, rows)
    padded = [jnp.pad(matrix, ((0, block), (0, 0))) for matrix in (x, y)]
    wide = dtypes.numpy_dtype(dtypes.opmath(dtypes.torch_dtype(x.dtype)))

    def add(start: jax.Array, end: jax.Array, stretch: jax.Array, out: jax.Array) -> jax.Array:
        inside = jnp.arange(block)[:, None] < end - start
        own_x, own_y = (jnp.where(inside, _block(matrix, start, block), 0) for matrix in padded)
        total = lax.dynamic_index_in_dim(out, stretch) + contract(own_x, own_y, ((0,), (0,)))
        return lax.dynamic_update_index_in_dim(out, total, stretch, 0)

    out = jnp.zeros((ends.shape[0], x.shape[1], y.shape[1]), wide)
    return _walk(_ordered(ends, rows), block, add, out).astype(x.dtype)


def _ordered(ends: jax.Array, rows: int) -> jax.Array:
    """Ends that never go back, so that a walk over them comes to an end; 0 where there is no stretch."""
    return lax.cummax(jnp.clip(ends, 0, rows)) if ends.size else jnp.zeros(1, ends.dtype)


def _block(matrix: jax.Array, start: jax.Array, block: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(matrix, start, block)


def _walk(
    ends: jax.Array, block: int, step: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array], out: jax.Array
) -> jax.Array:
    """Calls `step` with the first row, the end and the stretch of every block, and what it gave for the one before."""

    def advance(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        start, out = state
        stretch = jnp.sum(ends <= start)
        end = jnp.minimum(start + block, ends[stretch])
        return end, step(start, end, stretch, out)

    return lax.while_loop(lambda state: state[0] < ends[-1], advance, (jnp.zeros((), ends.dtype), out))[1]
