"""Rules for products of matrices and vectors."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import lax

from torch_xla.ops import dtypes, host_kernel
from torch_xla.ops.args import is_constant, scale
from torch_xla.ops.arithmetic import add, total
from torch_xla.ops.registry import Context, Meta, lowers


def contract(
    a: jax.Array,
    b: jax.Array,
    contracting: tuple[Sequence[int], Sequence[int]],
    batch: tuple[Sequence[int], Sequence[int]] = ((), ()),
    dtype: torch.dtype | None = None,
) -> jax.Array:
    """``lax.dot_general`` that accumulates half types in float32.

    It gives `dtype`, by default the accumulator's, for what comes before the one rounding. A plain product asks for its
    result's: XLA accumulates in float32 all the same, and need not write the accumulators to memory.
    """
    dtype = dtypes.opmath(dtypes.torch_dtype(a.dtype)) if dtype is None else dtype
    product = functools.partial(
        lax.dot_general,
        dimension_numbers=(contracting, batch),
        preferred_element_type=dtypes.numpy_dtype(dtype),
    )
    if a.dtype != jnp.int64:
        return product(a, b)
    # XLA has no products of 64-bit integers for TPUs.
    summed = functools.partial(_sum_of_products, contracting=contracting, batch=batch)
    return lax.platform_dependent(a, b, tpu=summed, default=product)


def _sum_of_products(
    a: jax.Array,
    b: jax.Array,
    contracting: tuple[Sequence[int], Sequence[int]],
    batch: tuple[Sequence[int], Sequence[int]],
) -> jax.Array:
    """``lax.dot_general`` of integers by multiplication and addition, which XLA fuses."""

    def ordered(x: jax.Array, side: int, others: int) -> jax.Array:
        """Dimensions in the order batch, own, those of the other operand, contracted."""
        first, last = tuple(batch[side]), tuple(contracting[side])
        free_dims = tuple(d for d in range(x.ndim) if d not in (*first, *last))
        x = lax.transpose(x, (*first, *free_dims, *last))
        after = len(first) + (len(free_dims) if side == 0 else 0)
        return lax.expand_dims(x, range(after, after + others))

    free = [x.ndim - len(batch[side]) - len(contracting[side]) for side, x in enumerate((a, b))]
    products = ordered(a, 0, free[1]) * ordered(b, 1, free[0])
    return jnp.sum(products, tuple(range(len(batch[0]) + sum(free), products.ndim)), dtype=a.dtype)


def _matmul(a: jax.Array, b: jax.Array, dtype: torch.dtype | None = None) -> jax.Array:
    """A product over the last dimension of `a` and the last but one of `b` (the last, if `b` is a vector)."""
    batch = tuple(range(a.ndim - 2)) if b.ndim > 2 else ()
    return contract(a, b, ((a.ndim - 1,), (max(b.ndim - 2, 0),)), (batch, batch), dtype)


def _accumulate(ctx: Context, x: jax.Array, product: jax.Array, beta: Any, alpha: Any) -> jax.Array:
    """``beta * x + alpha * product``, where a zero `beta` ignores NaN and infinity in `x`."""
    product = scale(product, alpha)
    if is_constant(beta, 0):
        return jnp.broadcast_to(product, ctx.meta.shape)
    x = x.astype(product.dtype)
    if not is_constant(beta, 1):
        factor = dtypes.cast(beta, dtypes.torch_dtype(product.dtype))
        x = jnp.where(factor == 0, jnp.zeros((), x.dtype), factor * x)
    return add(x, product)


@lowers("aten.mm.default", "aten.bmm.default", "aten.mv.default", "aten.mm.dtype", "aten.bmm.dtype")
def _mm(ctx: Context, a: jax.Array, b: jax.Array, out_dtype: torch.dtype | None = None) -> jax.Array:
    return _matmul(a, b, ctx.meta.dtype)


@lowers("aten.addmm.default", "aten.baddbmm.default", "aten.addmv.default", "aten.addmm.dtype", "aten.baddbmm.dtype")
def _addmm(
    ctx: Context, x: jax.Array, a: jax.Array, b: jax.Array, out_dtype: Any = None, *, beta: Any, alpha: Any
) -> jax.Array:
    return _accumulate(ctx, x, _matmul(a, b), beta, alpha)


@lowers("aten.addbmm.default")
def _addbmm(ctx: Context, x: jax.Array, a: jax.Array, b: jax.Array, *, beta: Any, alpha: Any) -> jax.Array:
    return _accumulate(ctx, x, contract(a, b, ((0, 2), (0, 1))), beta, alpha)


@lowers("aten.addr.default")
def _addr(ctx: Context, x: jax.Array, a: jax.Array, b: jax.Array, *, beta: Any, alpha: Any) -> jax.Array:
    if ctx.meta.dtype == torch.bool:
        product = a[:, None] & b[None, :] & dtypes.cast(alpha, torch.bool)
        return (x & dtypes.cast(beta, torch.bool)) | product
    wide = dtypes.opmath(ctx.meta.dtype)
    return _accumulate(ctx, x, dtypes.cast(a, wide)[:, None] * dtypes.cast(b, wide)[None, :], beta, alpha)


@lowers("aten.dot.default")
def _dot(ctx: Context, a: jax.Array, b: jax.Array) -> jax.Array:
    return contract(a, b, ((0,), (0,)), dtype=ctx.meta.dtype)


@lowers("aten.vdot.default")
def _vdot(ctx: Context, a: jax.Array, b: jax.Array) -> jax.Array:
    return contract(jnp.conj(a), b, ((0,), (0,)), dtype=ctx.meta.dtype)


@lowers("aten.linear.default")
def _linear(ctx: Context, x: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
    dtype = ctx.meta.dtype if bias is None else None
    out = contract(x, weight, ((x.ndim - 1,), (weight.ndim - 1,)), dtype=dtype)
    return out if bias is None else add(out, bias.astype(out.dtype))


@lowers("aten.linear_backward.default")
def _linear_backward(
    ctx: Context, x: jax.Array, grad: jax.Array, weight: jax.Array, output_mask: Sequence[bool]
) -> tuple[jax.Array | None, jax.Array | None, jax.Array | None]:
    rows = tuple(range(grad.ndim - 1))
    dtype = dtypes.torch_dtype(x.dtype)
    grad_x = contract(grad, weight, ((grad.ndim - 1,), (0,)), dtype=dtype) if output_mask[0] else None
    if not any(output_mask[1:]):
        return grad_x, None, None
    # PyTorch's shapes know both or neither of these; XLA leaves out what nobody takes.
    return grad_x, _weight_grad(grad, x, dtype), total(grad, rows)


def _weight_grad(grad: jax.Array, x: jax.Array, dtype: torch.dtype) -> jax.Array:
    """Sum over all rows of the outer products of the last dimensions."""
    if host_kernel.in_use():
        # XLA:CPU transposes both for a product that sums over several dimensions, and neither where it is the first.
        grad, x = (jnp.reshape(v, (math.prod(v.shape[:-1]), v.shape[-1])) for v in (grad, x))
        out = Meta((grad.shape[-1], x.shape[-1]), dtype)
        results = host_kernel.attempt(torch.ops.aten.tensordot.default, (grad, x, [0], [0]), {}, (out,), aside=True)
        if results is not None:
            return results[0]
    rows = tuple(range(grad.ndim - 1))
    return contract(grad, x, (rows, rows), dtype=dtype)


@lowers("aten.matmul.default")
def _matmul_broadcast(ctx: Context, a: jax.Array, b: jax.Array) -> jax.Array:
    if a.dtype == jnp.int64:
        a, b = jnp.atleast_2d(a), b if b.ndim > 1 else b[:, None]
        batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        a, b = (jnp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b))
        return jnp.reshape(_matmul(a, b), ctx.meta.shape)
    return jnp.matmul(a, b, preferred_element_type=dtypes.numpy_dtype(ctx.meta.dtype))


@lowers("aten._trilinear.default")
def _trilinear(
    ctx: Context,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    expand1: Sequence[int],
    expand2: Sequence[int],
    expand3: Sequence[int],
    sumdim: Sequence[int],
    unroll_dim: int,
) -> jax.Array:
    a, b, c = (jnp.expand_dims(x, tuple(d)) for x, d in ((a, expand1), (b, expand2), (c, expand3)))
    if a.dtype == jnp.int64:
        return jnp.sum(a * b * c, tuple(sumdim))
    subscripts = list(range(a.ndim))
    shape = jnp.broadcast_shapes(a.shape, b.shape, c.shape)
    operands: list[Any] = []
    for x in (a, b, c):
        # Broadcast dimensions are left out of a term instead of being expanded.
        labels = [d for d in subscripts if x.shape[d] == shape[d]]
        operands += [jnp.reshape(x, [x.shape[d] for d in labels]), labels]
    labels = [d for d in subscripts if d not in sumdim]
    return jnp.einsum(*operands, labels)
