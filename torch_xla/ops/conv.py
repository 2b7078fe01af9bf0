"""Rules for convolutions in one to three dimensions, transposed ones included, and their gradients."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torch_xla.ops import dtypes, precision
from torch_xla.ops.args import along, ints
from torch_xla.ops.matmul import contract
from torch_xla.ops.registry import Context, lowers

Three = tuple[jax.Array | None, jax.Array | None, jax.Array | None]

# Whether programs are lowered for a mesh, part of what a lowered operator is: a convolution in groups of batches would
# gather the batch.
over_mesh: ContextVar[bool] = ContextVar("over a mesh", default=False)


@dataclass(frozen=True, slots=True)
class _Geometry:
    """The spatial arguments of a convolution, one entry per spatial dimension."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int


def _geometry(
    ndim: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
) -> _Geometry:
    n = ndim - 2
    return _Geometry(ints(stride, n), ints(padding, n), ints(dilation, n), ints(output_padding, n, (0,) * n), groups)


def _forward(x: jax.Array, weight: jax.Array, g: _Geometry) -> jax.Array:
    """Correlation of ``x [N, C, ...]`` with ``weight [O, C/groups, ...]``."""
    return _correlation(x, weight, g.stride, [(p, p) for p in g.padding], (1,) * len(g.stride), g.dilation, g.groups)


def _correlation(
    x: jax.Array,
    weight: jax.Array,
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    spread: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> jax.Array:
    """A correlation of an image whose elements are spread out first."""
    convolution = functools.partial(
        lax.conv_general_dilated,
        window_strides=strides,
        padding=padding,
        lhs_dilation=spread,
        rhs_dilation=dilation,
        feature_group_count=groups,
    )
    if x.dtype != np.int64:
        return convolution(x, weight)

    def products(x: jax.Array, weight: jax.Array) -> jax.Array:
        sides = [(0, 0, 0), (0, 0, 0), *((*sides, n - 1) for sides, n in zip(padding, spread, strict=True))]
        return _by_position(lax.pad(x, jnp.zeros((), x.dtype), sides), weight, strides, dilation, groups)

    # XLA has no convolutions of 64-bit integers for TPUs.
    return lax.platform_dependent(x, weight, tpu=products, default=convolution)


def _by_position(
    x: jax.Array, weight: jax.Array, strides: Sequence[int], dilation: Sequence[int], groups: int
) -> jax.Array:
    """The correlation with an image that is padded, as a sum of products, one for each position of the kernel."""
    kernel = weight.shape[2:]
    weight = jnp.reshape(weight, (groups, weight.shape[0] // groups, *weight.shape[1:]))
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    extents = [(n - r) // s + 1 for n, r, s in zip(x.shape[2:], reach, strides, strict=True)]
    out: Any = 0
    for position in itertools.product(*(range(k) for k in kernel)):
        first = [i * d for i, d in zip(position, dilation, strict=True)]
        last = [f + (n - 1) * s + 1 for f, n, s in zip(first, extents, strides, strict=True)]
        window = _in_groups(lax.slice(x, (0, 0, *first), (*x.shape[:2], *last), (1, 1, *strides)), groups)
        out += contract(weight[(..., *position)], window, ((2,), (2,)), ((0,), (1,)))
    return jnp.reshape(jnp.moveaxis(out, 2, 0), (x.shape[0], -1, *extents))


def _swap_io(weight: jax.Array, groups: int) -> jax.Array:
    """Input and output channels exchanged within each group, and the kernel flipped."""
    o, i, *kernel = weight.shape
    weight = lax.rev(weight, tuple(range(2, weight.ndim)))
    weight = jnp.reshape(weight, (groups, o // groups, i, *kernel))
    return jnp.reshape(jnp.swapaxes(weight, 1, 2), (groups * i, o // groups, *kernel))


def _input_grad(grad: jax.Array, weight: jax.Array, sizes: Sequence[int], g: _Geometry) -> jax.Array:
    """Gradient of `_forward` by its input, whose spatial extents are `sizes`; also the transposed convolution."""
    padding = []
    for d, size in enumerate(sizes):
        reach = g.dilation[d] * (weight.shape[d + 2] - 1)
        spread = (grad.shape[d + 2] - 1) * g.stride[d] + 1
        before = reach - g.padding[d]
        padding.append((before, size + reach - spread - before))
    flipped = _swap_io(weight, g.groups)
    return _correlation(grad, flipped, (1,) * len(g.stride), padding, g.stride, g.dilation, g.groups)


def _weight_grad(x: jax.Array, grad: jax.Array, kernel: Sequence[int], g: _Geometry) -> jax.Array:
    """Gradient of `_forward` by its weight."""
    as_convolution = functools.partial(_weight_grad_convolution, kernel=kernel, g=g)
    as_products = functools.partial(_weight_grad_products, kernel=kernel, g=g)
    if g.groups > 1 and over_mesh.get():
        return as_products(x, grad)
    # XLA's CPU convolution is slow with a dilated or image-sized kernel: measured 13.0 against 1.7 ms for a 1x1
    # kernel with stride 2, 29 against 12 ms for 3x3 with stride 2, 28 against 18 ms for 256 channels of 14x14.
    channels = x.shape[1]
    gains = math.prod(kernel) == 1 or max(g.stride) > 1 or channels >= 128
    if g.groups == 1 and channels >= 16 and math.prod(kernel) <= 49 and gains:
        return lax.platform_dependent(x, grad, cpu=as_products, default=as_convolution)
    return as_convolution(x, grad)


def _weight_grad_products(x: jax.Array, grad: jax.Array, kernel: Sequence[int], g: _Geometry) -> jax.Array:
    """One matrix product for each position of the kernel, or one of each group."""
    zero = jnp.zeros((), x.dtype)
    x = lax.pad(x, zero, [(0, 0, 0), (0, 0, 0), *((p, p, 0) for p in g.padding)])
    shape = (grad.shape[1], x.shape[1] // g.groups, *kernel)
    batch: tuple[int, ...] = ()
    if g.groups > 1:
        grad, batch = _in_groups(grad, g.groups), (1,)
    rows = (0, *range(grad.ndim - len(kernel), grad.ndim))
    products = []
    for position in itertools.product(*(range(k) for k in kernel)):
        first = [i * d for i, d in zip(position, g.dilation, strict=True)]
        last = [f + (n - 1) * s + 1 for f, n, s in zip(first, grad.shape[-len(kernel) :], g.stride, strict=True)]
        window = lax.slice(x, (0, 0, *first), (*x.shape[:2], *last), (1, 1, *g.stride))
        window = _in_groups(window, g.groups) if batch else window
        products.append(contract(grad, window, (rows, rows), (batch, batch)))
    return jnp.reshape(jnp.stack(products, axis=-1), shape)


def _in_groups(values: jax.Array, groups: int) -> jax.Array:
    batch, channels, *sizes = values.shape
    return jnp.reshape(values, (batch, groups, channels // groups, *sizes))


def _weight_grad_convolution(x: jax.Array, grad: jax.Array, kernel: Sequence[int], g: _Geometry) -> jax.Array:
    """A convolution in which batch and channels change places."""
    n = len(kernel)
    padding = []
    for d, k in enumerate(kernel):
        window = (k - 1) * g.dilation[d] + 1
        spread = (grad.shape[d + 2] - 1) * g.stride[d] + 1
        padding.append((g.padding[d], window - 1 + spread - x.shape[d + 2] - g.padding[d]))
    spatial = tuple(range(2, n + 2))
    layout = lax.ConvDimensionNumbers((1, 0, *spatial), (1, 0, *spatial), (1, 0, *spatial))
    out = lax.conv_general_dilated(
        x,
        grad,
        window_strides=g.dilation,
        padding=padding,
        rhs_dilation=g.stride,
        dimension_numbers=layout,
        batch_group_count=g.groups,
    )
    return dtypes.cast(out, dtypes.opmath(dtypes.dtype_of(out)))


def _convolve(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, transposed: bool, g: _Geometry, sizes: Sequence[int]
) -> jax.Array:
    """The convolution; `sizes` are the spatial extents of the result."""
    if x.size == 0 or weight.size == 0:
        channels = weight.shape[1] * g.groups if transposed else weight.shape[0]
        out = jnp.zeros((x.shape[0], channels, *sizes), x.dtype)
    else:
        out = _input_grad(x, weight, sizes, g) if transposed else _forward(x, weight, g)
    return out if bias is None else out + along(bias.astype(out.dtype), 1, out.ndim)


@lowers("aten.convolution.default", "aten.convolution_overrideable.default")
def _convolution(
    ctx: Context,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> jax.Array:
    g = _geometry(weight.ndim, stride, padding, dilation, output_padding, groups)
    with jax.default_matmul_precision(precision.current().convolutions):
        return _convolve(x, weight, bias, transposed, g, ctx.meta.shape[2:])


@lowers("aten._convolution.default")
def _convolution_flags(ctx: Context, *args: object) -> jax.Array:
    return _convolution(ctx, *args[:9])


@lowers("aten.mkldnn_convolution.default")
def _convolution_plain(
    ctx: Context,
    x: jax.Array,
    weight: jax.Array,
    bias: jax.Array | None,
    padding: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> jax.Array:
    return _convolution(ctx, x, weight, bias, stride, padding, dilation, False, (), groups)


@lowers("aten.convolution_backward.default")
def _convolution_backward(
    ctx: Context,
    grad: jax.Array,
    x: jax.Array,
    weight: jax.Array,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Three:
    g = _geometry(weight.ndim, stride, padding, dilation, output_padding, groups)
    with jax.default_matmul_precision(precision.current().convolutions):
        return _gradients(grad, x, weight, transposed, g, output_mask)


def _gradients(
    grad: jax.Array, x: jax.Array, weight: jax.Array, transposed: bool, g: _Geometry, output_mask: Sequence[bool]
) -> Three:
    grad_x = grad_weight = grad_bias = None
    empty = math.prod(grad.shape) == 0 or x.size == 0 or weight.size == 0
    if output_mask[0]:
        if empty:
            grad_x = jnp.zeros_like(x)
        elif transposed:
            # An output padding of a stride or more reaches windows that no element of the input has.
            full_grad = _forward(grad, weight, g)
            grad_x = lax.slice(full_grad, (0,) * x.ndim, (*full_grad.shape[:2], *x.shape[2:]))
        else:
            grad_x = _input_grad(grad, weight, x.shape[2:], g)
    if output_mask[1]:
        source, cotangent = (grad, x) if transposed else (x, grad)
        grad_weight = jnp.zeros_like(weight) if empty else _weight_grad(source, cotangent, weight.shape[2:], g)
    if output_mask[2]:
        grad_bias = jnp.sum(dtypes.widen(grad), axis=(0, *range(2, grad.ndim)))
    return grad_x, grad_weight, grad_bias


@lowers("aten.convolution_backward_overrideable.default")
def _convolution_backward_overrideable(
    ctx: Context, grad: jax.Array, x: jax.Array, weight: jax.Array, *rest: object
) -> Three:
    return _convolution_backward(ctx, grad, x, weight, None, *rest)
