"""Rule of `xla::quantized_matmul`: products with integer weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_xla.ops import dtypes
from torch_xla.ops.registry import Context, lowers

_LARGEST = 127  # of int8, without the smallest number, which has no counterpart


def _times(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.multiply(*dtypes.promote(a, b)).astype(dtypes.numpy_dtype(dtypes.result_type(a, b)))


def _sum(x: jax.Array) -> jax.Array:
    """Over the last dimension, as PyTorch adds up: half types in float32, integers in int64."""
    integral = jnp.issubdtype(x.dtype, jnp.integer)
    return jnp.sum(x, axis=-1, dtype=jnp.int64 if integral else x.dtype)


def _quantized(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A row as int8 and its factor."""
    factor = jnp.max(jnp.abs(x), axis=-1, keepdims=True) / jnp.asarray(_LARGEST, x.dtype)
    return dtypes.cast(jnp.round(x / factor), torch.int8), factor


@lowers("xla.quantized_matmul.default")
def _quantized_matmul(
    ctx: Context,
    x: jax.Array,
    w: jax.Array,
    scale: jax.Array,
    zero_point: jax.Array | None,
    block_size: int | None,
    int4_weight: bool | None,
    quantize_activation: bool | None,
) -> jax.Array:
    if int4_weight:
        w = w.astype(jnp.int4)
    if block_size not in (None, -1):
        return _in_blocks(x, w, scale, zero_point)
    factor = None
    if quantize_activation:
        x, factor = _quantized(x)
    dimensions = (((x.ndim - 1,), (1,)), ((), ()))
    # A backend that multiplies mixed types (TPU) reads the weights as they are; for others JAX converts them.
    out = lax.dot_general(x, w, dimensions, preferred_element_type=jnp.int32 if quantize_activation else x.dtype)
    out = _times(out, scale)
    if zero_point is not None:
        out = out - _times(_sum(x)[..., None], zero_point).astype(out.dtype)
    return out if factor is None else _times(out, factor)


def _in_blocks(x: jax.Array, w: jax.Array, scale: jax.Array, zero_point: jax.Array | None) -> jax.Array:
    """Weights ``[blocks, size, columns]``, whose blocks have factors of their own."""
    x = x.reshape(*x.shape[:-1], *w.shape[:2])
    batch = ((0,), (x.ndim - 2,))
    out = lax.dot_general(w, x, (((1,), (x.ndim - 1,)), batch), preferred_element_type=x.dtype)
    out = jnp.moveaxis(out, (0, 1), (-2, -1))  # [blocks, columns, ...] to [..., blocks, columns]
    wide = dtypes.numpy_dtype(dtypes.opmath(dtypes.dtype_of(x)))
    result = jnp.sum(out.astype(wide) * scale.astype(wide), axis=-2).astype(x.dtype)
    if zero_point is None:
        return result
    return result - jnp.matmul(_sum(x), zero_point, preferred_element_type=wide).astype(result.dtype)
