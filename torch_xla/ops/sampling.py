"""Rules that read images at positions that are data: `grid_sample` and fractional max pooling, with gradients."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from torch_xla.ops import dtypes
from torch_xla.ops.args import ints
from torch_xla.ops.pool import greater, unpool
from torch_xla.ops.registry import Context, lowers
from torch_xla.ops.resize import cubic_weights

_BILINEAR, _NEAREST, _BICUBIC = range(3)
_ZEROS, _BORDER, _REFLECTION = range(3)


def _to_pixels(coordinate: jax.Array, size: int, align_corners: bool) -> jax.Array:
    """From [-1, 1] to element positions."""
    if align_corners:
        return (coordinate + 1) / 2 * (size - 1)
    return ((coordinate + 1) * size - 1) / 2


def _confine(position: jax.Array, size: int, padding: int, align_corners: bool) -> jax.Array:
    """Positions moved inside the image as the padding mode says."""
    if padding == _ZEROS:
        return position
    if padding == _REFLECTION:
        low, span = (0.0, float(size - 1)) if align_corners else (-0.5, float(size))
        if span == 0:
            position = jnp.zeros_like(position)
        else:
            distance = jnp.abs(position - low)
            rest = jnp.fmod(distance, span)
            odd = jnp.floor(distance / span) % 2 == 1
            position = jnp.where(odd, span - rest, rest) + low
    return jnp.where(jnp.isnan(position), 0, jnp.clip(position, 0, size - 1))  # as PyTorch's kernels


def _read(x: jax.Array, positions: Sequence[jax.Array]) -> jax.Array:
    """``x [N, C, *S]`` at integer positions ``[N, *O]`` (one array per spatial dimension), zero outside: [N, C, *O]."""
    n, c, *sizes = x.shape
    inside = functools.reduce(jnp.logical_and, [(p >= 0) & (p <= s - 1) for p, s in zip(positions, sizes, strict=True)])
    flat = jnp.zeros((), np.int64)
    for p, s in zip(positions, sizes, strict=True):
        flat = flat * s + jnp.clip(p, 0, s - 1).astype(np.int64)
    index = jnp.broadcast_to(jnp.reshape(flat, (n, 1, -1)), (n, c, math.prod(flat.shape[1:])))
    values = jnp.take_along_axis(jnp.reshape(x, (n, c, -1)), index, axis=2, mode="clip")
    values = jnp.reshape(values, (n, c, *flat.shape[1:]))
    return jnp.where(inside[:, None], values, jnp.zeros((), x.dtype))


def _sample(x: jax.Array, grid: jax.Array, interpolation: int, padding: int, align_corners: bool) -> jax.Array:
    x, grid = dtypes.widen(x), dtypes.widen(grid)
    sizes = x.shape[2:]
    # The grid's last dimension counts from the innermost spatial dimension.
    pixels = [_to_pixels(grid[..., len(sizes) - 1 - d], s, align_corners) for d, s in enumerate(sizes)]
    if interpolation == _BICUBIC:
        return _sample_cubic(x, pixels, padding, align_corners)
    pixels = [_confine(p, s, padding, align_corners) for p, s in zip(pixels, sizes, strict=True)]
    if interpolation == _NEAREST:
        return _read(x, [jnp.round(p) for p in pixels])
    floors = [jnp.floor(jax.lax.stop_gradient(p)) for p in pixels]
    out = jnp.zeros((), x.dtype)
    for corner in itertools.product((0, 1), repeat=len(sizes)):
        weight = jnp.ones((), x.dtype)
        for p, f, upper in zip(pixels, floors, corner, strict=True):
            weight = weight * ((p - f) if upper else (1 - (p - f)))
        out = out + _read(x, [f + u for f, u in zip(floors, corner, strict=True)]) * weight[:, None]
    return out


def _sample_cubic(x: jax.Array, pixels: Sequence[jax.Array], padding: int, align_corners: bool) -> jax.Array:
    floors = [jnp.floor(jax.lax.stop_gradient(p)) for p in pixels]
    weights = [cubic_weights(p - f) for p, f in zip(pixels, floors, strict=True)]
    out = jnp.zeros((), x.dtype)
    for taps in itertools.product(range(4), repeat=len(pixels)):
        at = [
            _confine(f + (t - 1), s, padding, align_corners) for f, t, s in zip(floors, taps, x.shape[2:], strict=True)
        ]
        weight = functools.reduce(jnp.multiply, [w[t] for w, t in zip(weights, taps, strict=True)])
        out = out + _read(x, at) * weight[:, None]
    return out


@lowers("aten.grid_sampler_2d.default", "aten.grid_sampler_3d.default")
def _grid_sampler(
    ctx: Context, x: jax.Array, grid: jax.Array, interpolation: int, padding: int, align_corners: bool
) -> jax.Array:
    return _sample(x, grid, interpolation, padding, align_corners)


@lowers("aten.grid_sampler_2d_backward.default", "aten.grid_sampler_3d_backward.default")
def _grid_sampler_backward(
    ctx: Context,
    grad: jax.Array,
    x: jax.Array,
    grid: jax.Array,
    interpolation: int,
    padding: int,
    align_corners: bool,
    output_mask: Sequence[bool],
) -> tuple[jax.Array | None, jax.Array]:
    def forward(x: jax.Array, grid: jax.Array) -> jax.Array:
        return _sample(x, grid, interpolation, padding, align_corners)

    grad_x, grad_grid = jax.vjp(forward, dtypes.widen(x), dtypes.widen(grid))[1](dtypes.widen(grad))
    return (grad_x if output_mask[0] else None), grad_grid


def _starts(sample: jax.Array, size: int, out: int, kernel: int) -> jax.Array:
    """First elements ``[N, C, out]`` of the windows that a random sample ``[N, C]`` chooses along one dimension."""
    if out == 1:
        return jnp.full((*sample.shape, 1), size - kernel, np.int64)
    alpha = jnp.asarray((size - kernel) / (out - 1), sample.dtype)
    steps = sample[..., None] + jnp.arange(out, dtype=sample.dtype)
    first = (steps * alpha).astype(np.int64) - (sample * alpha).astype(np.int64)[..., None]
    return first.at[..., -1].set(size - kernel)


def _fractional_max_pool(
    x: jax.Array, kernel: Sequence[int], out: Sequence[int], samples: jax.Array
) -> tuple[jax.Array, jax.Array]:
    n = len(out)
    batched = x if x.ndim == n + 2 else x[None]
    lead, sizes = batched.shape[:2], batched.shape[2:]
    rows = jnp.reshape(batched, (*lead, math.prod(sizes)))
    samples = samples[: lead[0]].astype(x.dtype)  # there may be some for a larger batch
    # In two dimensions the first sample belongs to the columns, in three each to its own dimension.
    order = [1, 0] if n == 2 else list(range(n))
    starts = [_starts(samples[..., order[d]], sizes[d], out[d], kernel[d]) for d in range(n)]
    best = index = None
    for position in itertools.product(*(range(k) for k in kernel)):
        flat = jnp.zeros((), np.int64)
        for d in range(n):
            at = starts[d] + position[d]
            flat = flat * sizes[d] + jnp.reshape(at, (*lead, *(out[d] if i == d else 1 for i in range(n))))
        columns = jnp.reshape(flat, (*lead, math.prod(out)))
        value = jnp.take_along_axis(rows, columns, axis=2, mode="clip")
        if best is None or index is None:
            best, index = value, columns
            continue
        take = greater(value, best)
        best, index = jnp.where(take, value, best), jnp.where(take, columns, index)
    assert best is not None and index is not None
    shape = (*x.shape[: x.ndim - n], *out)
    return jnp.reshape(best, shape), jnp.reshape(index, shape)


@lowers("aten.fractional_max_pool2d.default", "aten.fractional_max_pool3d.default")
def _fractional_pool(
    ctx: Context, x: jax.Array, kernel: Sequence[int], out: Sequence[int], samples: jax.Array
) -> tuple[jax.Array, jax.Array]:
    n = samples.shape[-1]
    return _fractional_max_pool(x, ints(kernel, n), ints(out, n), samples)


@lowers("aten.fractional_max_pool2d_backward.default", "aten.fractional_max_pool3d_backward.default")
def _fractional_pool_backward(
    ctx: Context, grad: jax.Array, x: jax.Array, kernel: Sequence[int], out: Sequence[int], indices: jax.Array
) -> jax.Array:
    return unpool(grad, indices, x.shape[-3 if "3d" in ctx.op else -2 :])
