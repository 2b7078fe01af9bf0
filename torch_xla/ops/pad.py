"""Rules for padding, and for the patches of `unfold` and `fold`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from torch_xla.ops import dtypes, host_kernel
from torch_xla.ops.args import ints
from torch_xla.ops.registry import Context, lowers


@lowers("aten.constant_pad_nd.default")
def _constant_pad(ctx: Context, x: jax.Array, pad: Sequence[int], value: Any) -> jax.Array:
    config = [(0, 0, 0)] * x.ndim
    for i in range(len(pad) // 2):
        config[x.ndim - 1 - i] = (pad[2 * i], pad[2 * i + 1], 0)
    return host_kernel.once(lax.pad(x, dtypes.cast(value, ctx.meta.dtype), config))


def _border(x: jax.Array, dim: int, width: int, after: bool, reflect: bool) -> jax.Array:
    """The values of `width` elements of padding on one side of `dim`."""
    size = x.shape[dim]
    if reflect:
        first = size - 1 - width if after else 1
        return lax.rev(lax.slice_in_dim(x, first, first + width, 1, dim), (dim,))
    edge = lax.slice_in_dim(x, size - 1 if after else 0, size if after else 1, 1, dim)
    return jnp.broadcast_to(edge, (*x.shape[:dim], width, *x.shape[dim + 1 :]))


def _pad(x: jax.Array, pad: Sequence[int], reflect: bool) -> jax.Array:
    """Pads the last dimensions; a negative width crops."""
    for i in range(len(pad) // 2):
        dim, before, after = x.ndim - 1 - i, pad[2 * i], pad[2 * i + 1]
        parts = [x]
        if before > 0:
            parts.insert(0, _border(x, dim, before, False, reflect))
        if after > 0:
            parts.append(_border(x, dim, after, True, reflect))
        x = lax.concatenate(parts, dim) if len(parts) > 1 else x
        x = lax.slice_in_dim(x, max(-before, 0), x.shape[dim] - max(-after, 0), 1, dim)
    return x


def transpose_of(linear: Callable[[jax.Array], jax.Array], grad: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Applies the transpose of a linear map from arrays of `shape`; half types accumulate in float32."""
    grad = dtypes.widen(grad)
    if jnp.issubdtype(grad.dtype, jnp.integer):  # which have no gradients in JAX
        return jax.linear_transpose(linear, jax.ShapeDtypeStruct(tuple(shape), grad.dtype))(grad)[0]
    return jax.vjp(linear, jnp.zeros(tuple(shape), grad.dtype))[1](grad)[0]


def _register(kind: str, reflect: bool) -> None:
    @lowers(*(f"aten.{kind}_pad{n}d.default" for n in (1, 2, 3)))
    def forward(ctx: Context, x: jax.Array, pad: Sequence[int]) -> jax.Array:
        return host_kernel.once(_pad(x, pad, reflect))

    @lowers(*(f"aten.{kind}_pad{n}d_backward.default" for n in (1, 2, 3)))
    def backward(ctx: Context, grad: jax.Array, x: jax.Array, pad: Sequence[int]) -> jax.Array:
        return transpose_of(lambda v: _pad(v, pad, reflect), grad, x.shape)


_register("reflection", reflect=True)
_register("replication", reflect=False)


def _patches(
    x: jax.Array, kernel: tuple[int, ...], dilation: tuple[int, ...], padding: tuple[int, ...], stride: tuple[int, ...]
) -> jax.Array:
    """``[N, C, H, W]`` as ``[N, C * kh * kw, L]``: the L windows, one column each."""
    x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (0, 0, 0), *((p, p, 0) for p in padding)])
    n, c, *size = x.shape
    count = [(size[d] - dilation[d] * (kernel[d] - 1) - 1) // stride[d] + 1 for d in range(2)]
    slices = []
    for i, j in itertools.product(range(kernel[0]), range(kernel[1])):
        first = (i * dilation[0], j * dilation[1])
        last = [f + (m - 1) * s + 1 for f, m, s in zip(first, count, stride, strict=True)]
        slices.append(lax.slice(x, (0, 0, *first), (n, c, *last), (1, 1, *stride)))
    return jnp.reshape(jnp.stack(slices, axis=2), (n, c * kernel[0] * kernel[1], count[0] * count[1]))


@lowers("aten.im2col.default")
def _im2col(
    ctx: Context,
    x: jax.Array,
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> jax.Array:
    batched = x if x.ndim == 4 else x[None]
    out = _patches(batched, ints(kernel, 2), ints(dilation, 2), ints(padding, 2), ints(stride, 2))
    return jnp.reshape(out, ctx.meta.shape)


@lowers("aten.col2im.default")
def _col2im(
    ctx: Context,
    x: jax.Array,
    output_size: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> jax.Array:
    batched = x if x.ndim == 3 else x[None]
    kernel = ints(kernel, 2)
    channels = batched.shape[1] // (kernel[0] * kernel[1])
    geometry = (ints(dilation, 2), ints(padding, 2), ints(stride, 2))
    shape = (batched.shape[0], channels, *ints(output_size, 2))
    out = transpose_of(lambda v: _patches(v, kernel, *geometry), batched, shape)
    return jnp.reshape(out, ctx.meta.shape)
