"""Rules for pooling: windows of fixed size, adaptive windows, and the gradients of both."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torch_xla.ops import dtypes
from torch_xla.ops.args import ints
from torch_xla.ops.division import divide
from torch_xla.ops.pad import transpose_of
from torch_xla.ops.registry import Context, lowers

# Up to so many positions a window is read as that many strided slices, which XLA fuses into one loop.
_MAX_SLICES = 81


@dataclass(frozen=True, slots=True)
class _Window:
    """A pooling window over the last dimensions of an array of extents `size`, whose result has extents `out`."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    size: tuple[int, ...]
    out: tuple[int, ...]

    @property
    def n(self) -> int:
        """Number of pooled dimensions."""
        return len(self.kernel)

    def trailing(self) -> list[int]:
        """Padding after each dimension, as far as the last window reaches; negative where it ends earlier."""
        reach = zip(self.kernel, self.stride, self.padding, self.dilation, self.size, self.out, strict=True)
        return [(o - 1) * s + (k - 1) * d + 1 - n - p for k, s, p, d, n, o in reach]

    def positions(self) -> Iterator[tuple[int, ...]]:
        """The window's elements in row-major order, as offsets from its start."""
        return itertools.product(*(range(0, k * d, d) for k, d in zip(self.kernel, self.dilation, strict=True)))

    def pad(self, x: jax.Array, value: float | int | bool) -> jax.Array:
        """`x` with the borders that windows read filled with `value`."""
        config = [(0, 0, 0)] * (x.ndim - self.n) + [
            (p, t, 0) for p, t in zip(self.padding, self.trailing(), strict=True)
        ]
        return lax.pad(x, jnp.asarray(value, x.dtype), config)

    def read(self, padded: jax.Array, position: Sequence[int]) -> jax.Array:
        """The element at `position` of every window."""
        lead = padded.ndim - self.n
        last = [p + (o - 1) * s + 1 for p, o, s in zip(position, self.out, self.stride, strict=True)]
        return lax.slice(padded, (*[0] * lead, *position), (*padded.shape[:lead], *last), (*[1] * lead, *self.stride))

    def spread(self, values: jax.Array, position: Sequence[int]) -> jax.Array:
        """The transpose of pad and read: each window's value at its element, zero elsewhere."""
        lead = values.ndim - self.n
        config = [(0, 0, 0)] * lead
        for d in range(self.n):
            before = position[d] - self.padding[d]
            used = (self.out[d] - 1) * self.stride[d] + 1
            config.append((before, self.size[d] - before - used, self.stride[d] - 1))
        return lax.pad(values, jnp.zeros((), values.dtype), config)

    def index(self, position: Sequence[int]) -> np.ndarray:
        """Row-major index in the pooled array of the element at `position` of every window; int64."""
        flat = np.zeros(self.out, np.int64)
        for d in range(self.n):
            at = np.arange(self.out[d]) * self.stride[d] - self.padding[d] + position[d]
            flat = flat * self.size[d] + at.reshape([-1 if i == d else 1 for i in range(self.n)])
        return flat

    def index_of(self, element: jax.Array) -> jax.Array:
        """Row-major index in the pooled array of the `element`-th position of each window (`element`: [..., *out])."""
        flat = jnp.zeros((), np.int64)
        strides = np.cumprod([1, *reversed(self.kernel)])[:-1][::-1]
        for d in range(self.n):
            start = np.arange(self.out[d]) * self.stride[d] - self.padding[d]
            within = (element // int(strides[d])) % self.kernel[d]
            start = start.reshape([-1 if i == d else 1 for i in range(self.n)])
            flat = flat * self.size[d] + start + within * self.dilation[d]
        return flat


def _window(
    x: jax.Array,
    n: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    out: Sequence[int],
) -> _Window:
    kernel = ints(kernel, n)
    return _Window(kernel, ints(stride, n, kernel), ints(padding, n), ints(dilation, n), x.shape[-n:], tuple(out[-n:]))


def _lowest(dtype: np.dtype) -> float | int | bool:
    if dtype == np.bool_:
        return False
    return jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.integer) else -math.inf


def greater(new: jax.Array, best: jax.Array) -> jax.Array:
    """Where `new` replaces `best` in a window's maximum: the last NaN wins, else the first of equals stays."""
    return (new > best) | jnp.isnan(new) if jnp.issubdtype(new.dtype, jnp.floating) else new > best


def _max_pool(x: jax.Array, w: _Window) -> tuple[jax.Array, jax.Array]:
    """Maxima and their row-major indices (int64) in the pooled dimensions."""
    if math.prod(x.shape[: x.ndim - w.n]) == 0:
        shape = (*x.shape[: x.ndim - w.n], *w.out)
        return jnp.zeros(shape, x.dtype), jnp.zeros(shape, np.int64)
    padded = w.pad(x, _lowest(x.dtype))
    # Padding must not win against elements of the same value, so the running index starts at the first real one.
    inside = w.pad(jnp.ones(w.size, np.int32), 0)
    if math.prod(w.kernel) > _MAX_SLICES:
        return _max_pool_windows(padded, inside, w)
    first, *others = w.positions()
    best, started = w.read(padded, first), w.read(inside, first) != 0
    element = jnp.zeros(best.shape, np.int32)
    for i, position in enumerate(others, start=1):
        value, real = w.read(padded, position), w.read(inside, position) != 0
        take = real & (greater(value, best) | ~started)
        best, element = jnp.where(take, value, best), jnp.where(take, np.int32(i), element)
        started = started | real
    return best, w.index_of(element)


def _max_pool_windows(padded: jax.Array, inside: jax.Array, w: _Window) -> tuple[jax.Array, jax.Array]:
    """As `_max_pool`, for windows too large to unroll."""
    lead = padded.ndim - w.n
    order = lax.iota(np.int64, math.prod(inside.shape)).reshape(inside.shape)
    none = np.iinfo(np.int64).max
    order = jnp.broadcast_to(jnp.where(inside != 0, order, none), padded.shape)

    def pick(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        later = b[1] > a[1]
        first = jnp.where(a[0] == b[0], later, jnp.where(later, ~greater(b[0], a[0]), greater(a[0], b[0])))
        return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])

    init = (jnp.asarray(_lowest(padded.dtype), padded.dtype), jnp.asarray(none, np.int64))
    best, at = lax.reduce_window(
        (padded, order),
        init,
        pick,
        (*[1] * lead, *w.kernel),
        (*[1] * lead, *w.stride),
        [(0, 0)] * padded.ndim,
        window_dilation=(*[1] * lead, *w.dilation),
    )
    flat, weight = jnp.zeros((), np.int64), 1
    for d in reversed(range(w.n)):
        flat = flat + (at % inside.shape[d] - w.padding[d]) * weight
        at, weight = at // inside.shape[d], weight * w.size[d]
    return best, flat


def _max_pool_rule(
    n: int,
    ctx: Context,
    x: jax.Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> tuple[jax.Array, jax.Array]:
    return _max_pool(x, _window(x, n, kernel, stride, padding, dilation, ctx.meta.shape))


def _max_pool_backward(
    n: int,
    ctx: Context,
    grad: jax.Array,
    x: jax.Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: jax.Array,
) -> jax.Array:
    w = _window(x, n, kernel, stride, padding, dilation, grad.shape)
    if math.prod(w.kernel) > _MAX_SLICES or grad.size == 0:
        return unpool(grad, indices, w.size)
    grad = dtypes.widen(grad)
    out = jnp.zeros(x.shape, grad.dtype)
    for position in w.positions():
        hit = indices == w.index(position)
        out = out + w.spread(jnp.where(hit, grad, jnp.zeros((), grad.dtype)), position)
    return out


def unpool(grad: jax.Array, indices: jax.Array, size: Sequence[int]) -> jax.Array:
    """Adds each value at its row-major index over the last dimensions."""
    n = len(size)
    lead = grad.shape[: grad.ndim - n]
    rows = math.prod(lead)
    flat = jnp.zeros((rows, math.prod(size)), dtypes.widen(grad).dtype)
    row = jnp.arange(rows)[:, None]
    at = jnp.reshape(indices, (rows, math.prod(grad.shape[grad.ndim - n :])))
    flat = flat.at[row, at].add(jnp.reshape(grad, at.shape).astype(flat.dtype), mode="drop")
    return jnp.reshape(flat, (*lead, *size))


def _divisors(w: _Window, size: Sequence[int], count_include_pad: bool, divisor: int | None) -> np.ndarray | int:
    """The divisor of each window's sum."""
    if divisor:
        return divisor
    counts = np.ones((), np.int64)
    for k, s, p, n, o in zip(w.kernel, w.stride, w.padding, size, w.out, strict=True):
        start = np.arange(o) * s - p
        # Padding counts, but not the part of a last window that `ceil_mode` hangs over it.
        end = np.minimum(start + k, n + p)
        inner = np.minimum(end, n) - np.maximum(start, 0)
        counts = counts[..., None] * (end - start if count_include_pad else inner)
    return counts


def _window_sums(x: jax.Array, w: _Window) -> jax.Array:
    padded = w.pad(x, 0)
    if math.prod(w.kernel) <= _MAX_SLICES:
        return functools.reduce(lax.add, [w.read(padded, position) for position in w.positions()])
    lead = [1] * (x.ndim - w.n)
    zero = jnp.zeros((), x.dtype)
    return lax.reduce_window(padded, zero, lax.add, (*lead, *w.kernel), (*lead, *w.stride), [(0, 0)] * x.ndim)


def _shares(total: jax.Array, counts: np.ndarray | int) -> jax.Array:
    if dtypes.is_floating(total) or dtypes.is_complex(total):
        return divide(total, jnp.asarray(counts, total.dtype))
    return lax.div(total, jnp.broadcast_to(jnp.asarray(counts, total.dtype), total.shape))


def _avg_pool_rule(
    n: int,
    ctx: Context,
    x: jax.Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None = None,
) -> jax.Array:
    w = _window(x, n, kernel, stride, padding, (1,), ctx.meta.shape)
    return _shares(_window_sums(dtypes.widen(x), w), _divisors(w, x.shape[-n:], count_include_pad, divisor))


def _avg_pool_backward(
    n: int,
    ctx: Context,
    grad: jax.Array,
    x: jax.Array,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> jax.Array:
    w = _window(x, n, kernel, stride, padding, (1,), grad.shape)
    shares = _shares(dtypes.widen(grad), _divisors(w, x.shape[-n:], count_include_pad, divisor))
    return transpose_of(lambda v: _window_sums(v, w), shares, x.shape)


def _bounds(size: int, out: int) -> tuple[np.ndarray, np.ndarray]:
    """First and past-the-last element of each adaptive window."""
    i = np.arange(out)
    return i * size // out, -(-(i + 1) * size // out)


def _adaptive_windows(x: jax.Array, dim: int, out: int) -> tuple[jax.Array, np.ndarray, np.ndarray]:
    """Dimension `dim` as (window, element).

    Returns the elements, which of them count (bool [out, longest]), and their positions (int64 [out, longest]).
    """
    size = x.shape[dim]
    start, end = _bounds(size, out)
    longest = int((end - start).max(initial=0))
    index = start[:, None] + np.arange(longest)
    valid = index < end[:, None]
    if size % out == 0:
        return jnp.reshape(x, (*x.shape[:dim], out, size // out, *x.shape[dim + 1 :])), valid, index
    return jnp.take(x, np.minimum(index, size - 1), axis=dim), valid, index


def _across(values: np.ndarray, dim: int, ndim: int) -> np.ndarray:
    """An [out, element] table shaped to broadcast over dimensions `dim` and ``dim + 1``."""
    shape = [1] * ndim
    shape[dim], shape[dim + 1] = values.shape
    return values.reshape(shape)


def _adaptive_avg(x: jax.Array, out: Sequence[int]) -> jax.Array:
    x = dtypes.widen(x)
    n = len(out)
    for d, o in zip(range(x.ndim - n, x.ndim), out, strict=True):
        if o == 0:
            return jnp.zeros((*x.shape[:-n], *out), x.dtype)
        windows, valid, _ = _adaptive_windows(x, d, o)
        windows = jnp.where(_across(valid, d, windows.ndim), windows, jnp.zeros((), x.dtype))
        counts = valid.sum(axis=1).reshape([-1 if i == d else 1 for i in range(x.ndim)])
        x = divide(jnp.sum(windows, axis=d + 1), counts.astype(x.dtype))
    return x


@lowers(
    "aten._adaptive_avg_pool2d.default",
    "aten._adaptive_avg_pool3d.default",
    "aten.adaptive_avg_pool1d.default",
    "aten.adaptive_avg_pool2d.default",
    "aten.adaptive_avg_pool3d.default",
)
def _adaptive_avg_pool(ctx: Context, x: jax.Array, size: Sequence[int]) -> jax.Array:
    return _adaptive_avg(x, ctx.meta.shape[-len(size) :])


def _adaptive_avg_backward(n: int, ctx: Context, grad: jax.Array, x: jax.Array) -> jax.Array:
    wide = dtypes.widen(grad)
    zeros = jnp.zeros(x.shape, wide.dtype)
    return jax.vjp(lambda v: _adaptive_avg(v, grad.shape[-n:]), zeros)[1](wide)[0]


def _adaptive_max(n: int, ctx: Context, x: jax.Array, size: Sequence[int]) -> tuple[jax.Array, jax.Array]:
    """Reduces one dimension after the other, the last first, so that the first maximum in row-major order wins."""
    out, lead = ctx.meta.shape[-n:], x.ndim - n
    extents = x.shape[lead:]
    if math.prod(ctx.meta.shape) == 0:
        return jnp.zeros(ctx.meta.shape, x.dtype), jnp.zeros(ctx.meta.shape, np.int64)
    index = jnp.zeros((1,) * x.ndim, np.int64)
    weight = 1
    for d in reversed(range(n)):
        windows, valid, positions = _adaptive_windows(x, lead + d, out[d])
        valid_here = _across(valid, lead + d, windows.ndim)
        windows = jnp.where(valid_here, windows, jnp.asarray(_lowest(x.dtype), x.dtype))
        best = _position(windows, lead + d + 1)
        x = jnp.squeeze(jnp.take_along_axis(windows, best, axis=lead + d + 1), lead + d + 1)
        here = jnp.take_along_axis(
            jnp.broadcast_to(_across(positions, lead + d, windows.ndim), windows.shape), best, axis=lead + d + 1
        )
        if weight > 1:
            carried, _, _ = _adaptive_windows(index, lead + d, out[d])
            index = jnp.squeeze(jnp.take_along_axis(carried, best, axis=lead + d + 1), lead + d + 1)
        index = index + jnp.squeeze(here, lead + d + 1) * weight
        weight *= extents[d]
    return x, index


def _position(windows: jax.Array, axis: int) -> jax.Array:
    """The positions of the maxima along a dimension, by `greater`."""
    first = jnp.argmax(windows, axis=axis, keepdims=True)
    if not jnp.issubdtype(windows.dtype, jnp.floating):
        return first
    nan = jnp.isnan(windows)
    last = windows.shape[axis] - 1 - jnp.argmax(jnp.flip(nan, axis), axis=axis, keepdims=True)
    return jnp.where(jnp.any(nan, axis=axis, keepdims=True), last, first)


def _adaptive_max_backward(n: int, ctx: Context, grad: jax.Array, x: jax.Array, indices: jax.Array) -> jax.Array:
    return unpool(grad, indices, x.shape[-n:])


def _register(pattern: str, rule: Callable[..., object], dims: Sequence[int]) -> None:
    for n in dims:
        lowers(pattern.format(n))(functools.partial(rule, n))


_register("aten.max_pool{}d_with_indices.default", _max_pool_rule, (1, 2, 3))
_register("aten.max_pool{}d_with_indices_backward.default", _max_pool_backward, (2, 3))
_register("aten.avg_pool{}d.default", _avg_pool_rule, (1, 2, 3))
_register("aten.avg_pool{}d_backward.default", _avg_pool_backward, (2, 3))
_register("aten._adaptive_avg_pool{}d_backward.default", _adaptive_avg_backward, (2, 3))
_register("aten.adaptive_max_pool{}d.default", _adaptive_max, (1, 2, 3))
_register("aten.adaptive_max_pool{}d_backward.default", _adaptive_max_backward, (2, 3))
