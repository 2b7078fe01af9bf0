"""Connectionist temporal classification: the loss of an unaligned label sequence, and its derivative."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from torch_xla.ops import dtypes
from torch_xla.ops.registry import Context, lowers

# Log-probability of the impossible. Finite, so that derivatives stay defined.
_NEVER = -1e30

Lengths = Sequence[int] | jax.Array


def _rows(targets: jax.Array, lengths: Lengths, width: int) -> jax.Array:
    """Targets as [batch, width]; a flat tensor holds them one after another."""
    if targets.ndim == 2:
        return jnp.pad(targets, ((0, 0), (0, max(0, width - targets.shape[1]))))[:, :width]
    lengths = jnp.asarray(lengths)
    starts = jnp.cumsum(lengths) - lengths
    places = jnp.minimum(starts[:, None] + jnp.arange(width), max(targets.shape[0] - 1, 0))
    return targets[places] if targets.size else jnp.zeros((lengths.shape[0], width), targets.dtype)


def _forward(
    log_probs: jax.Array, targets: jax.Array, input_lengths: Lengths, target_lengths: Lengths, blank: int, states: int
) -> tuple[jax.Array, jax.Array]:
    """Negative log-likelihoods [batch], and log-probabilities of all prefixes [batch, time, states].

    The states are the labels with a blank before, between and behind them.
    """
    steps, batch, _ = log_probs.shape
    labels = _rows(targets, target_lengths, states // 2)
    extended = jnp.full((batch, states), blank, labels.dtype).at[:, 1::2].set(labels)
    # A blank between two different labels may be skipped; before the first two states there is nothing.
    before = jnp.pad(extended, ((0, 0), (2, 0)), constant_values=blank)[:, :states]
    skips = (extended != before) & (jnp.arange(states) % 2 == 1) & (jnp.arange(states) >= 2)
    emitted = jnp.take_along_axis(log_probs, jnp.broadcast_to(extended, (steps, batch, states)), axis=2)
    emitted = jnp.maximum(emitted, _NEVER)

    def shift(alpha: jax.Array, by: int) -> jax.Array:
        return jnp.pad(alpha, ((0, 0), (by, 0)), constant_values=_NEVER)[:, :states]

    def step(alpha: jax.Array, emission: jax.Array) -> tuple[jax.Array, jax.Array]:
        stay, advance = alpha, shift(alpha, 1)
        skip = jnp.where(skips, shift(alpha, 2), _NEVER)
        best = lax.stop_gradient(jnp.maximum(jnp.maximum(stay, advance), skip))
        total = lax.exp(stay - best) + lax.exp(advance - best) + lax.exp(skip - best)
        alpha = jnp.maximum(best + lax.log(total) + emission, _NEVER)
        return alpha, alpha

    first = jnp.where(jnp.arange(states) < 2, emitted[0], _NEVER)
    _, later = lax.scan(step, first, emitted[1:])
    alphas = jnp.concatenate([first[None], later]).transpose(1, 0, 2)
    last_step = jnp.maximum(jnp.asarray(input_lengths) - 1, 0)
    last = jnp.take_along_axis(alphas, last_step[:, None, None], axis=1)[:, 0]
    ends = 2 * jnp.asarray(target_lengths)
    at_blank = jnp.take_along_axis(last, ends[:, None], axis=1)[:, 0]
    at_label = jnp.take_along_axis(last, jnp.maximum(ends - 1, 0)[:, None], axis=1)[:, 0]
    at_label = jnp.where(ends > 0, at_label, _NEVER)
    loss = -jnp.logaddexp(at_blank, at_label)
    # Of no input, the empty target alone is possible.
    return jnp.where(jnp.asarray(input_lengths) > 0, loss, jnp.where(ends > 0, -_NEVER, jnp.zeros_like(loss))), alphas


@lowers("aten._ctc_loss.default", "aten._ctc_loss.Tensor", "xla.ctc_loss.default")
def _ctc_loss(
    ctx: Context,
    log_probs: jax.Array,
    targets: jax.Array,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int,
    zero_infinity: bool = False,
) -> tuple[jax.Array, jax.Array]:
    shape = ctx.out[1]
    assert shape is not None
    loss, alphas = _forward(dtypes.widen(log_probs), targets, input_lengths, target_lengths, blank, shape.shape[2])
    impossible = loss >= -_NEVER / 2
    return jnp.where(impossible, math.inf, loss), jnp.where(alphas <= _NEVER / 2, -math.inf, alphas)


@lowers("aten._ctc_loss_backward.default", "aten._ctc_loss_backward.Tensor", "xla.ctc_loss_backward.default")
def _ctc_loss_backward(
    ctx: Context,
    grad: jax.Array,
    log_probs: jax.Array,
    targets: jax.Array,
    input_lengths: Lengths,
    target_lengths: Lengths,
    loss: jax.Array,
    log_alpha: jax.Array,
    blank: int,
    zero_infinity: bool,
) -> Any:
    log_probs, grad = dtypes.widen(log_probs), dtypes.widen(grad)

    def losses(log_probs: jax.Array) -> jax.Array:
        return _forward(log_probs, targets, input_lengths, target_lengths, blank, log_alpha.shape[2])[0]

    _, pull = jax.vjp(losses, log_probs)
    # PyTorch folds the derivative of the softmax before the loss in, which the softmax's own derivative then keeps.
    slope = pull(grad)[0] + lax.exp(log_probs) * grad[:, None]
    slope = jnp.where(jnp.isinf(loss)[:, None], 0.0 if zero_infinity else math.nan, slope)
    inside = jnp.arange(log_probs.shape[0])[:, None, None] < jnp.asarray(input_lengths)[:, None]
    return jnp.where(inside, slope, jnp.zeros_like(slope))
