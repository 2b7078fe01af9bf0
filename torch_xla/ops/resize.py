"""Rules for resampling images: nearest, linear and cubic interpolation, antialiased or not, and the gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_xla.ops import dtypes
from torch_xla.ops.args import along
from torch_xla.ops.pad import transpose_of
from torch_xla.ops.registry import Context, lowers

Scales = Sequence[float | None]


def _nearest_index(size: int, out: int, scale: float | None, exact: bool) -> np.ndarray:
    """Source element of each target element, with PyTorch's float32 arithmetic."""
    step = np.float32(1.0 / scale) if scale else np.float32(size) / np.float32(out)
    position = np.arange(out, dtype=np.float32) + np.float32(0.5 if exact else 0.0)
    return np.minimum(np.floor(position * step).astype(np.int64), size - 1)


def _nearest(x: jax.Array, out: Sequence[int], scales: Scales, exact: bool) -> jax.Array:
    lead = x.ndim - len(out)
    for d, (o, scale) in enumerate(zip(out, scales, strict=True), start=lead):
        size = x.shape[d]
        index = _nearest_index(size, o, scale, exact)
        if o == size and (index == np.arange(o)).all():
            continue
        if o % size == 0 and (index == np.arange(o) // (o // size)).all():
            repeated = jnp.broadcast_to(jnp.expand_dims(x, d + 1), (*x.shape[: d + 1], o // size, *x.shape[d + 1 :]))
            x = jnp.reshape(repeated, (*x.shape[:d], o, *x.shape[d + 1 :]))
        else:
            x = jnp.take(x, index, axis=d)
    return x


def _step(size: int, out: int, scale: float | None, align_corners: bool, dtype: np.dtype) -> Any:
    """Source elements from one target element to the next, computed in `dtype` as PyTorch does."""
    real = dtype.type
    if align_corners:
        return real(size - 1) / real(out - 1) if out > 1 else real(0)
    return real(1.0 / scale) if scale else real(size) / real(out)


def _source(
    size: int, out: int, scale: float | None, align_corners: bool, dtype: np.dtype, cubic: bool = False
) -> np.ndarray:
    """Real-valued source position of each target element."""
    step, i, half = _step(size, out, scale, align_corners, dtype), np.arange(out, dtype=dtype), dtype.type(0.5)
    if align_corners:
        return i * step
    position = step * (i + half) - half
    return position if cubic else np.maximum(position, dtype.type(0))


def _position_dtype(x: jax.Array) -> np.dtype:
    return np.dtype(np.float32 if x.dtype == jnp.float32 else np.float64)


def _weighted(x: jax.Array, d: int, indices: Sequence[np.ndarray], weights: Sequence[np.ndarray]) -> jax.Array:
    """Sum over taps of ``weight * x[index]`` along dimension `d`."""
    if not dtypes.is_floating(x):
        return _weighted_bytes(x, d, np.stack(indices), *_merged(indices, weights))
    taps = [
        jnp.take(x, index, axis=d) * along(jnp.asarray(weight, x.dtype), d, x.ndim)
        for index, weight in zip(indices, weights, strict=True)
    ]
    return functools.reduce(jnp.add, taps)


def _merged(indices: Sequence[np.ndarray], weights: Sequence[np.ndarray]) -> tuple[np.ndarray, float]:
    """Weights of which the last has the sum where neighbours read one element, and the largest sum on the way."""
    sums = np.stack(weights)
    largest = sums[0].max()
    for tap in range(1, len(sums)):
        same = indices[tap] == indices[tap - 1]
        sums[tap] += np.where(same, sums[tap - 1], 0)
        sums[tap - 1] = np.where(same, 0, sums[tap - 1])
        largest = max(largest, sums[tap].max())
    return sums, largest


def _weighted_bytes(x: jax.Array, d: int, index: np.ndarray, weight: np.ndarray, largest: float) -> jax.Array:
    """As the CPU kernel computes it: weights in as many bits as fit 16, an integer sum, rounded and cut to a byte."""
    bits = next((n for n in range(22) if int(0.5 + largest * (1 << (n + 1))) >= 1 << 15), 22)
    scaled = weight * (1 << bits)
    fixed_point = np.where(scaled < 0, scaled - 0.5, scaled + 0.5).astype(np.int32)
    taps = jnp.take(x, index, axis=d).astype(np.int32) * fixed_point.reshape(
        *fixed_point.shape, *(1,) * (x.ndim - d - 1)
    )
    return (jnp.clip((jnp.sum(taps, axis=d, dtype=np.int32) + (1 << bits >> 1)) >> bits, 0, 255)).astype(x.dtype)


def _sizes(x: jax.Array, out: Sequence[int], scales: Scales) -> list[tuple[int, int, int, float | None]]:
    """Dimensions that are resampled, with both sizes and the scale; the CPU kernel takes those of bytes backwards."""
    lead = x.ndim - len(out)
    sizes = [(d, x.shape[d], o, scale) for d, (o, scale) in enumerate(zip(out, scales, strict=True), start=lead)]
    return sizes if dtypes.is_floating(x) else [entry for entry in reversed(sizes) if entry[1] != entry[2]]


def _linear(x: jax.Array, out: Sequence[int], align_corners: bool, scales: Scales) -> jax.Array:
    for d, size, o, scale in _sizes(x, out, scales):
        if o == size:  # copied, whatever the scale
            continue
        position = _source(size, o, scale, align_corners, _position_dtype(x))
        low = np.minimum(np.floor(position).astype(np.int64), size - 1)
        high = np.minimum(low + 1, size - 1)
        fraction = np.clip(position - low, 0, 1)
        x = _weighted(x, d, (low, high), (1 - fraction, fraction))
    return x


def cubic_weights(t: Any) -> list[Any]:
    """Weights of the four neighbours at fraction `t`, for Keys' kernel with a = -0.75."""
    a = -0.75

    def near(s: Any) -> Any:
        return ((a + 2) * s - (a + 3)) * s * s + 1

    def far(s: Any) -> Any:
        return ((a * s - 5 * a) * s + 8 * a) * s - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _cubic(x: jax.Array, out: Sequence[int], align_corners: bool, scales: Scales) -> jax.Array:
    for d, size, o, scale in _sizes(x, out, scales):
        position = _source(size, o, scale, align_corners, _position_dtype(x), cubic=True)
        base = np.floor(position).astype(np.int64)
        indices = [np.clip(base + k, 0, size - 1) for k in (-1, 0, 1, 2)]
        x = _weighted(x, d, indices, cubic_weights((position - base).astype(position.dtype)))
    return x


def _antialias(x: jax.Array, out: Sequence[int], align_corners: bool, scales: Scales, cubic: bool) -> jax.Array:
    """Interpolation whose kernel widens when the image shrinks."""
    for d, size, o, scale in _sizes(x, out, scales):
        step = float(_step(size, o, scale, align_corners, np.dtype(np.float64)))
        stretch = max(step, 1.0)
        support = (2.0 if cubic else 1.0) * stretch
        center = step * (np.arange(o) + 0.5)
        first = np.maximum((center - support + 0.5).astype(np.int64), 0)
        last = np.minimum((center + support + 0.5).astype(np.int64), size)
        at = first[:, None] + np.arange(2 * int(np.ceil(support)) + 1)
        distance = np.abs(at - center[:, None] + 0.5) * (1.0 / stretch)
        weight = _antialias_cubic(distance) if cubic else np.maximum(1 - distance, 0)
        weight = np.where(at < last[:, None], weight, 0)
        total = np.cumsum(weight, axis=1)[:, -1:]  # one after the other, as the CPU kernel does
        weight = weight / np.where(total == 0, 1, total)
        at = np.minimum(at, size - 1)
        if not dtypes.is_floating(x):
            x = _weighted_bytes(x, d, at.T, weight.T, weight.max())
            continue
        dense = np.zeros((o, size))
        np.add.at(dense, (np.arange(o)[:, None], at), weight)
        x = jnp.moveaxis(jnp.tensordot(x, jnp.asarray(dense, x.dtype), ((d,), (1,))), -1, d)
    return x


def _antialias_cubic(s: np.ndarray) -> np.ndarray:
    a = -0.5
    near = ((a + 2) * s - (a + 3)) * s * s + 1
    far = ((a * s - 5 * a) * s + 8 * a) * s - 4 * a
    return np.where(s < 1, near, np.where(s < 2, far, 0))


def _register_nearest(name: str, n: int, exact: bool) -> None:
    @lowers(f"aten.{name}{n}d.default")
    def forward(ctx: Context, x: jax.Array, size: Sequence[int], *scales: float | None) -> jax.Array:
        return _nearest(x, ctx.meta.shape[-n:], scales, exact)

    @lowers(f"aten.{name}{n}d_backward.default")
    def backward(
        ctx: Context, grad: jax.Array, size: Sequence[int], input_size: Sequence[int], *scales: float | None
    ) -> jax.Array:
        return transpose_of(lambda v: _nearest(v, grad.shape[-n:], scales, exact), grad, input_size)


def _register_smooth(name: str, n: int, resample: Callable[..., jax.Array]) -> None:
    @lowers(f"aten.{name}.default")
    def forward(
        ctx: Context, x: jax.Array, size: Sequence[int], align_corners: bool, *scales: float | None
    ) -> jax.Array:
        return resample(dtypes.widen(x), ctx.meta.shape[-n:], align_corners, scales)

    @lowers(f"aten.{name}_backward.default")
    def backward(
        ctx: Context,
        grad: jax.Array,
        size: Sequence[int],
        input_size: Sequence[int],
        align_corners: bool,
        *scales: float | None,
    ) -> jax.Array:
        return transpose_of(lambda v: resample(v, grad.shape[-n:], align_corners, scales), grad, input_size)


for _n in (1, 2, 3):
    _register_nearest("upsample_nearest", _n, exact=False)
    _register_nearest("_upsample_nearest_exact", _n, exact=True)
_register_smooth("upsample_linear1d", 1, _linear)
_register_smooth("upsample_bilinear2d", 2, _linear)
_register_smooth("upsample_trilinear3d", 3, _linear)
_register_smooth("upsample_bicubic2d", 2, _cubic)
_register_smooth("_upsample_bilinear2d_aa", 2, functools.partial(_antialias, cubic=False))
_register_smooth("_upsample_bicubic2d_aa", 2, functools.partial(_antialias, cubic=True))
