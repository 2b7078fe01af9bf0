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


def _source(
    size: int, out: int, scale: float | None, align_corners: bool, dtype: np.dtype, cubic: bool = False
) -> np.ndarray:
    """Real-valued source position of each target element, computed in `dtype` as PyTorch does."""
    real = dtype.type
    i = np.arange(out, dtype=dtype)
    if align_corners:
        return i * (real(size - 1) / real(out - 1) if out > 1 else real(0))
    step = real(1.0 / scale) if scale else real(size) / real(out)
    position = step * (i + real(0.5)) - real(0.5)
    return position if cubic else np.maximum(position, real(0))


def _position_dtype(x: jax.Array) -> np.dtype:
    return np.dtype(np.float64 if x.dtype == jnp.float64 else np.float32)


def _weighted(x: jax.Array, d: int, indices: Sequence[np.ndarray], weights: Sequence[np.ndarray]) -> jax.Array:
    """Sum over taps of ``weight * x[index]`` along dimension `d`."""
    taps = [
        jnp.take(x, index, axis=d) * along(jnp.asarray(weight, x.dtype), d, x.ndim)
        for index, weight in zip(indices, weights, strict=True)
    ]
    return functools.reduce(jnp.add, taps)


def _linear(x: jax.Array, out: Sequence[int], align_corners: bool, scales: Scales) -> jax.Array:
    lead = x.ndim - len(out)
    for d, (o, scale) in enumerate(zip(out, scales, strict=True), start=lead):
        size = x.shape[d]
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
    lead = x.ndim - len(out)
    for d, (o, scale) in enumerate(zip(out, scales, strict=True), start=lead):
        size = x.shape[d]
        position = _source(size, o, scale, align_corners, _position_dtype(x), cubic=True)
        base = np.floor(position).astype(np.int64)
        indices = [np.clip(base + k, 0, size - 1) for k in (-1, 0, 1, 2)]
        x = _weighted(x, d, indices, cubic_weights((position - base).astype(position.dtype)))
    return x


def _antialias(x: jax.Array, out: Sequence[int], align_corners: bool, scales: Scales, cubic: bool) -> jax.Array:
    """Interpolation whose kernel widens when the image shrinks."""
    lead = x.ndim - len(out)
    for d, (o, scale) in enumerate(zip(out, scales, strict=True), start=lead):
        size = x.shape[d]
        plain = 1.0 / scale if scale else size / o
        step = (size - 1) / max(o - 1, 1) if align_corners else plain
        stretch = max(step, 1.0)
        support = (2.0 if cubic else 1.0) * stretch
        center = step * (np.arange(o) + 0.5)
        first = np.maximum((center - support + 0.5).astype(np.int64), 0)
        last = np.minimum((center + support + 0.5).astype(np.int64), size)
        at = np.arange(size)
        distance = np.abs(at[None] - center[:, None] + 0.5) / stretch
        weight = _antialias_cubic(distance) if cubic else np.maximum(1 - distance, 0)
        weight = np.where((at >= first[:, None]) & (at < last[:, None]), weight, 0)
        weight = weight / weight.sum(axis=1, keepdims=True)
        x = jnp.moveaxis(jnp.tensordot(x, jnp.asarray(weight, x.dtype), ((d,), (1,))), -1, d)
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
        return resample(_floating(x), ctx.meta.shape[-n:], align_corners, scales)

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


def _floating(x: jax.Array) -> jax.Array:
    return dtypes.widen(x) if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(np.float32)


for _n in (1, 2, 3):
    _register_nearest("upsample_nearest", _n, exact=False)
    _register_nearest("_upsample_nearest_exact", _n, exact=True)
_register_smooth("upsample_linear1d", 1, _linear)
_register_smooth("upsample_bilinear2d", 2, _linear)
_register_smooth("upsample_trilinear3d", 3, _linear)
_register_smooth("upsample_bicubic2d", 2, _cubic)
_register_smooth("_upsample_bilinear2d_aa", 2, functools.partial(_antialias, cubic=False))
_register_smooth("_upsample_bicubic2d_aa", 2, functools.partial(_antialias, cubic=True))
