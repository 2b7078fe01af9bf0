"""Rules for fused attention: softmax(q k^T * scale + bias) v and its gradient, as one operator each.

Long sequences are computed some rows of the queries at a time, so that no array of all scores exists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torch_xla.ops import dtypes, host_kernel
from torch_xla.ops.registry import Context, Meta, lowers

MaybeArray = jax.Array | None

# PyTorch's kernels for CPUs.
_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

# Scores of one call that are held at once, and how many rows of queries are then taken at a time.
_SCORES = 1 << 24
_ROWS = 256


def _heads(x: jax.Array, count: int) -> jax.Array:
    """Key or value heads repeated so that there are `count` (grouped-query attention)."""
    return x if x.shape[-3] == count else jnp.repeat(x, count // x.shape[-3], axis=-3)


def _product(a: jax.Array, b: jax.Array, transpose: bool = False) -> jax.Array:
    """``a @ b`` (or ``a @ b^T``) over batched matrices; half types accumulate in float32."""
    wide = dtypes.numpy_dtype(dtypes.opmath(dtypes.dtype_of(a)))
    b = jnp.swapaxes(b, -1, -2) if transpose else b
    return jnp.matmul(a, b, preferred_element_type=wide)


def _scores(
    q: jax.Array, k: jax.Array, bias: MaybeArray, is_causal: bool, scale: float | None, first: jax.Array | int
) -> jax.Array:
    """Scaled and masked scores ``[..., L, S]`` in the wide type; `first` is the place of the first query."""
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = _product(q, k, transpose=True) * factor
    if is_causal:
        scores = jnp.where(_causal(scores.shape, first), scores, -jnp.inf)
    if bias is None:
        return scores
    if bias.dtype == np.bool_:
        return jnp.where(bias, scores, -jnp.inf)
    return scores + bias.astype(scores.dtype)


def _causal(shape: Sequence[int], first: jax.Array | int) -> jax.Array:
    rows = lax.broadcasted_iota(np.int32, tuple(shape[-2:]), 0) + jnp.asarray(first, np.int32)
    return lax.broadcasted_iota(np.int32, tuple(shape[-2:]), 1) <= rows


def _softmax(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Probabilities and log-sum-exp over the last dimension; a row with nothing to attend to is zero."""
    peak = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    peak = jnp.where(jnp.isneginf(peak), 0.0, peak)
    exponentials = jnp.exp(scores - peak)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    probabilities = exponentials / jnp.where(total == 0, 1.0, total)
    return probabilities, jnp.squeeze(peak + jnp.log(total), -1)


def _keep(key: jax.Array, first: jax.Array | int, shape: Sequence[int], p: float) -> jax.Array:
    """Which probabilities dropout keeps, already divided by the share kept."""
    keep_mask = jax.random.bernoulli(jax.random.fold_in(key, first), 1.0 - p, tuple(shape))
    return jnp.where(keep_mask, 1.0 / (1.0 - p) if p < 1 else 0.0, 0.0)


def _chunks(q: jax.Array, k: jax.Array) -> int:
    """In how many parts the rows of the queries are taken."""
    if not all(isinstance(size, int) for size in (*q.shape, *k.shape)):  # some are left open by an export
        return 1
    scores = math.prod(q.shape[:-1]) * k.shape[-2]
    return -(-q.shape[-2] // _ROWS) if scores > _SCORES and q.shape[-2] > _ROWS else 1


def _split(x: jax.Array, chunks: int, axis: int) -> jax.Array:
    """`x` in equal parts along an axis counted from the end, stacked in front; the last one is filled with zeros."""
    axis %= x.ndim
    padding = [(0, chunks * _ROWS - x.shape[axis] if d == axis else 0) for d in range(x.ndim)]
    x = jnp.reshape(jnp.pad(x, padding), (*x.shape[:axis], chunks, _ROWS, *x.shape[axis + 1 :]))
    return jnp.moveaxis(x, axis, 0)


def _join(x: jax.Array, rows: int, axis: int) -> jax.Array:
    """The inverse of `_split`."""
    axis %= x.ndim - 1
    x = jnp.moveaxis(x, 0, axis)
    x = jnp.reshape(x, (*x.shape[:axis], -1, *x.shape[axis + 2 :]))
    return lax.slice_in_dim(x, 0, rows, axis=axis)


def _split_bias(bias: MaybeArray, chunks: int) -> tuple[MaybeArray, MaybeArray]:
    """A bias as (the same for all chunks, one part per chunk)."""
    if bias is None or bias.ndim < 2 or bias.shape[-2] == 1:
        return bias, None
    return None, _split(bias, chunks, -2)


def _attend(
    ctx: Context,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: MaybeArray,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> tuple[jax.Array, jax.Array]:
    """Output in the wide type, and the log-sum-exp of each row."""
    k, v = _heads(k, q.shape[-3]), _heads(v, q.shape[-3])
    key = ctx.key() if dropout_p > 0 else None

    def rows(first: jax.Array | int, q: jax.Array, bias: MaybeArray) -> tuple[jax.Array, jax.Array]:
        probabilities, logsumexp = _softmax(_scores(q, k, bias, is_causal, scale, first))
        if key is not None:
            probabilities = probabilities * _keep(key, first, probabilities.shape, dropout_p)
        return _product(probabilities.astype(v.dtype), v), logsumexp

    chunks = _chunks(q, k)
    if chunks == 1:
        return rows(0, q, bias)
    common, parts = _split_bias(bias, chunks)
    steps = (jnp.arange(chunks) * _ROWS, _split(q, chunks, -2), parts)
    out, logsumexp = lax.map(lambda at: rows(at[0], at[1], common if at[2] is None else at[2]), steps)
    return _join(out, q.shape[-2], -2), _join(logsumexp, q.shape[-2], -1)


def _ungroup(grad: jax.Array, heads: int) -> jax.Array:
    """Sums the gradients of repeated heads; the inverse of `_heads`."""
    if grad.shape[-3] == heads:
        return grad
    split = (*grad.shape[:-3], heads, grad.shape[-3] // heads, *grad.shape[-2:])
    return jnp.sum(jnp.reshape(grad, split), axis=-3)


def _attend_backward(
    grad: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: MaybeArray,
    out: jax.Array,
    logsumexp: jax.Array,
    is_causal: bool,
    scale: float | None,
    dropout: tuple[jax.Array, float] | None = None,
    bias_grad: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, MaybeArray]:
    """Gradients by query, key and value; and by the scores where `bias_grad`, or where all are there anyway.

    Probabilities are computed again from the log-sum-exp, and dropped by the forward's key and probability.
    """
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    groups = (k.shape[-3], v.shape[-3])
    k, v = _heads(k, q.shape[-3]), _heads(v, q.shape[-3])

    def rows(
        first: jax.Array | int, grad: jax.Array, q: jax.Array, out: jax.Array, logsumexp: jax.Array, bias: MaybeArray
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        row = logsumexp[..., None]
        scores = _scores(q, k, bias, is_causal, scale, first)
        if row.dtype.itemsize < scores.dtype.itemsize:  # PyTorch keeps it in float32, too little for float64
            probabilities, _ = _softmax(scores)
        else:
            probabilities = jnp.where(jnp.isneginf(row), 0.0, jnp.exp(scores - jnp.where(jnp.isneginf(row), 0.0, row)))
        keep = None if dropout is None else _keep(dropout[0], first, probabilities.shape, dropout[1])
        dropped = probabilities if keep is None else probabilities * keep
        grad_v = _product(jnp.swapaxes(dropped, -1, -2).astype(grad.dtype), grad)
        grad_p = _product(grad, v, transpose=True)
        grad_p = grad_p if keep is None else grad_p * keep
        correction = jnp.sum(dtypes.widen(grad) * dtypes.widen(out), axis=-1, keepdims=True)
        grad_scores = probabilities * (grad_p - correction)
        narrow = grad_scores.astype(q.dtype)
        grad_q = _product(narrow, k) * factor
        grad_k = _product(jnp.swapaxes(narrow, -1, -2), q) * factor
        return grad_q, grad_k, grad_v, grad_scores

    chunks = 1 if bias_grad else _chunks(q, k)
    if chunks == 1:
        grad_q, grad_k, grad_v, grad_scores = rows(0, grad, q, out, logsumexp, bias)
        return grad_q, _ungroup(grad_k, groups[0]), _ungroup(grad_v, groups[1]), grad_scores
    common, parts = _split_bias(bias, chunks)

    def step(total: tuple[jax.Array, jax.Array], at: tuple[Any, ...]) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        first, grad, q, out, logsumexp, part = at
        grad_q, grad_k, grad_v, _ = rows(first, grad, q, out, logsumexp, common if part is None else part)
        return (total[0] + grad_k, total[1] + grad_v), grad_q

    # A row of the filling has gradient zero, so what its probabilities are does not matter as long as they are finite.
    split = [_split(x, chunks, -2) for x in (grad, q, out)]
    steps = (jnp.arange(chunks) * _ROWS, *split, _split(logsumexp, chunks, -1), parts)
    wide = dtypes.numpy_dtype(dtypes.opmath(dtypes.dtype_of(q)))
    (grad_k, grad_v), grad_q = lax.scan(step, (jnp.zeros(k.shape, wide), jnp.zeros(v.shape, wide)), steps)
    return _join(grad_q, q.shape[-2], -2), _ungroup(grad_k, groups[0]), _ungroup(grad_v, groups[1]), None


@lowers("aten._scaled_dot_product_flash_attention_for_cpu.default")
def _flash(
    ctx: Context,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: MaybeArray,
    scale: float | None,
) -> tuple[jax.Array, jax.Array]:
    return _attend(ctx, q, k, v, attn_mask, dropout_p, is_causal, scale)


@lowers("aten._scaled_dot_product_flash_attention_for_cpu_backward.default")
def _flash_backward(
    ctx: Context,
    grad: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    logsumexp: jax.Array,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: MaybeArray,
    scale: float | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    return _attend_backward(grad, q, k, v, attn_mask, out, logsumexp, is_causal, scale)[:3]


@lowers("aten.scaled_dot_product_attention.default")
def _attention(
    ctx: Context,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    attn_mask: MaybeArray,
    dropout_p: float,
    is_causal: bool,
    *,
    scale: float | None,
    enable_gqa: bool,
) -> jax.Array:
    return _attend(ctx, q, k, v, attn_mask, dropout_p, is_causal, scale)[0]


@lowers("aten._scaled_dot_product_fused_attention_overrideable.default")
def _fused(
    ctx: Context,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    attn_bias: MaybeArray,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None,
) -> tuple[MaybeArray, ...]:
    results = None
    if dropout_p == 0 and host_kernel.in_use():
        operands = (q, _heads(k, q.shape[-3]), _heads(v, q.shape[-3]), 0.0, is_causal)
        options = {"attn_mask": _additive(attn_bias, q), "scale": scale}
        results = host_kernel.attempt(_CPU.default, operands, options, ctx.out[:2])
    out, logsumexp = results or _attend(ctx, q, k, v, attn_bias, dropout_p, is_causal, scale)
    # The backward draws the same dropout again from the words of the seed, which are saved here.
    words = ctx.seed if dropout_p > 0 and ctx.seed is not None else (jnp.zeros((), np.int64),) * 2
    return out, logsumexp, None, None, None, None, *words, None


@lowers("aten._scaled_dot_product_fused_attention_overrideable_backward.default")
def _fused_backward(
    ctx: Context,
    grad: MaybeArray,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    attn_bias: MaybeArray,
    grad_input_mask: Sequence[bool],
    out: jax.Array,
    logsumexp: jax.Array,
    cum_seq_q: MaybeArray,
    cum_seq_k: MaybeArray,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: jax.Array,
    philox_offset: jax.Array,
    *,
    scale: float | None,
) -> tuple[MaybeArray, ...]:
    if grad is None:  # no one used the result
        grad = jnp.zeros_like(out)
    dropout = None
    if dropout_p > 0:  # the forward's, drawn again
        words = philox_seed.astype(np.uint32), philox_offset.astype(np.uint32)
        dropout = (Context(ctx.op, ctx.out, words).key(), dropout_p)
    bias_grad = attn_bias is not None and grad_input_mask[3]
    if dropout_p == 0 and not grad_input_mask[3] and host_kernel.in_use():
        operands = (q, _heads(k, q.shape[-3]), _heads(v, q.shape[-3]))
        metas = [Meta(x.shape, dtypes.torch_dtype(x.dtype)) for x in operands]
        options = {"attn_mask": _additive(attn_bias, q), "scale": scale}
        gradients = host_kernel.attempt(
            _CPU_BACKWARD.default, (grad, *operands, out, logsumexp, 0.0, is_causal), options, metas
        )
        if gradients is not None:
            grad_q, grad_k, grad_v = gradients
            return grad_q, _ungroup(grad_k, k.shape[-3]), _ungroup(grad_v, v.shape[-3]), None
    *grads, grad_scores = _attend_backward(
        grad, q, k, v, attn_bias, out, logsumexp, is_causal, scale, dropout, bias_grad
    )
    if attn_bias is None or not bias_grad or grad_scores is None:
        return (*grads, None)
    return (*grads, _unbroadcast(grad_scores, attn_bias.shape))


def _additive(bias: MaybeArray, like: jax.Array) -> MaybeArray:
    """A mask of booleans as one to be added."""
    if bias is None or bias.dtype != np.bool_:
        return bias
    return jnp.where(bias, jnp.zeros((), like.dtype), jnp.asarray(-math.inf, like.dtype))


def _unbroadcast(grad: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Sums over the dimensions along which an array of `shape` was broadcast."""
    grad = jnp.sum(grad, axis=tuple(range(grad.ndim - len(shape))))
    dims = tuple(d for d, n in enumerate(shape) if n == 1 and grad.shape[d] != 1)
    return jnp.sum(grad, axis=dims, keepdims=True)
