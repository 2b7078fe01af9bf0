"""Rules for fused attention: softmax(q k^T * scale + bias) v and its gradient, as one operator each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torch_xla.ops import dtypes
from torch_xla.ops.registry import Context, lowers

MaybeArray = jax.Array | None


def _heads(x: jax.Array, count: int) -> jax.Array:
    """Key or value heads repeated so that there are `count` (grouped-query attention)."""
    return x if x.shape[-3] == count else jnp.repeat(x, count // x.shape[-3], axis=-3)


def _product(a: jax.Array, b: jax.Array, transpose: bool = False) -> jax.Array:
    """``a @ b`` (or ``a @ b^T``) over batched matrices; half types accumulate in float32."""
    wide = dtypes.numpy_dtype(dtypes.opmath(dtypes.dtype_of(a)))
    b = jnp.swapaxes(b, -1, -2) if transpose else b
    return jnp.matmul(a, b, preferred_element_type=wide)


def _scores(q: jax.Array, k: jax.Array, bias: MaybeArray, is_causal: bool, scale: float | None) -> jax.Array:
    """Scaled and masked scores ``[..., L, S]`` in the wide type."""
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = _product(q, k, transpose=True) * factor
    if is_causal:
        scores = jnp.where(_causal(scores.shape), scores, -jnp.inf)
    if bias is None:
        return scores
    if bias.dtype == np.bool_:
        return jnp.where(bias, scores, -jnp.inf)
    return scores + bias.astype(scores.dtype)


def _causal(shape: Sequence[int]) -> jax.Array:
    rows = lax.broadcasted_iota(np.int32, tuple(shape[-2:]), 0)
    return lax.broadcasted_iota(np.int32, tuple(shape[-2:]), 1) <= rows


def _softmax(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Probabilities and log-sum-exp over the last dimension; a row with nothing to attend to is zero."""
    peak = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    peak = jnp.where(jnp.isneginf(peak), 0.0, peak)
    exponentials = jnp.exp(scores - peak)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    probabilities = exponentials / jnp.where(total == 0, 1.0, total)
    return probabilities, jnp.squeeze(peak + jnp.log(total), -1)


def _keep(ctx: Context, shape: Sequence[int], p: float) -> jax.Array:
    """Which probabilities dropout keeps, already divided by the share kept."""
    kept = jax.random.bernoulli(ctx.key(), 1.0 - p, tuple(shape))
    return jnp.where(kept, 1.0 / (1.0 - p) if p < 1 else 0.0, 0.0)


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
    probabilities, logsumexp = _softmax(_scores(q, k, bias, is_causal, scale))
    if dropout_p > 0:
        probabilities = probabilities * _keep(ctx, probabilities.shape, dropout_p)
    return _product(probabilities.astype(v.dtype), v), logsumexp


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
    keep: MaybeArray = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Gradients by query, key, value and scores; probabilities are computed again from the log-sum-exp."""
    factor = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
    groups = (k.shape[-3], v.shape[-3])
    k, v = _heads(k, q.shape[-3]), _heads(v, q.shape[-3])
    row = logsumexp[..., None]
    scores = _scores(q, k, bias, is_causal, scale)
    probabilities = jnp.where(jnp.isneginf(row), 0.0, jnp.exp(scores - jnp.where(jnp.isneginf(row), 0.0, row)))
    dropped = probabilities if keep is None else probabilities * keep
    grad_v = _product(jnp.swapaxes(dropped, -1, -2).astype(grad.dtype), grad)
    grad_p = _product(grad, v, transpose=True)
    grad_p = grad_p if keep is None else grad_p * keep
    correction = jnp.sum(dtypes.widen(grad) * dtypes.widen(out), axis=-1, keepdims=True)
    grad_scores = probabilities * (grad_p - correction)
    narrow = grad_scores.astype(q.dtype)
    grad_q = _product(narrow, k) * factor
    grad_k = _product(jnp.swapaxes(narrow, -1, -2), q) * factor
    return grad_q, _ungroup(grad_k, groups[0]), _ungroup(grad_v, groups[1]), grad_scores


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
    out, logsumexp = _attend(ctx, q, k, v, attn_bias, dropout_p, is_causal, scale)
    # The backward draws the same dropout again from the seed and offset saved here.
    seed, offset = ctx.seed if dropout_p > 0 and ctx.seed is not None else (jnp.zeros((), np.int64),) * 2
    return out, logsumexp, None, None, None, None, seed, offset, None


@lowers("aten._scaled_dot_product_fused_attention_overrideable_backward.default")
def _fused_backward(
    ctx: Context,
    grad: jax.Array,
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
    keep = None
    if dropout_p > 0:
        drawn = Context(ctx.op, ctx.out, (philox_seed, philox_offset))
        keep = _keep(drawn, (*q.shape[:-1], k.shape[-2]), dropout_p)
    grads = _attend_backward(grad, q, k, v, attn_bias, out, logsumexp, is_causal, scale, keep)
    # PyTorch may promise a bias gradient that the mask does not ask for.
    if attn_bias is None or not (grad_input_mask[3] or ctx.out[3] is not None):
        return (*grads[:3], None)
    return (*grads[:3], _unbroadcast(grads[3], attn_bias.shape))


def _unbroadcast(grad: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Sums over the dimensions along which an array of `shape` was broadcast."""
    grad = jnp.sum(grad, axis=tuple(range(grad.ndim - len(shape))))
    dims = tuple(d for d, n in enumerate(shape) if n == 1 and grad.shape[d] != 1)
    return jnp.sum(grad, axis=dims, keepdims=True)
