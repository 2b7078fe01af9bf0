"""Fused optimizer steps and the loss scaling of automatic mixed precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from torch_xla.ops import dtypes
from torch_xla.ops.registry import Context, lowers

Arrays = Sequence[jax.Array]
Update = Callable[..., tuple[jax.Array, ...]]


def _each(
    update: Update,
    params: Arrays,
    grads: Arrays,
    states: Sequence[Arrays],
    steps: Arrays | None,
    grad_scale: jax.Array | None,
    found_inf: jax.Array | None,
) -> list[list[jax.Array]]:
    """Runs a step on every parameter; gives new parameters, unscaled gradients, and each list of new states.

    `update` maps parameter, gradient, states and, where there are any, step number to new parameter and states;
    `states` has one list for each state, with an entry for each parameter, or empty. Gradients are divided by
    `grad_scale` first; where `found_inf` is 1, nothing changes.
    """
    results: list[list[jax.Array]] = [[] for _ in range(2 + len(states))]
    used = [k for k, state in enumerate(states) if len(state)]
    for i, (param, grad) in enumerate(zip(params, grads, strict=True)):
        dtype = dtypes.compute_type(param)
        old = [dtypes.cast(x, dtype) for x in (param, *(states[k][i] for k in used))]
        unscaled = dtypes.cast(grad, dtype)
        if grad_scale is not None:
            unscaled = unscaled / dtypes.cast(grad_scale, dtype).reshape(())
        new = update(old[0], unscaled, *old[1:], *(() if steps is None else (dtypes.cast(steps[i], dtype),)))
        if found_inf is not None:
            skip = found_inf.reshape(()) == 1
            new = tuple(jnp.where(skip, before, after) for before, after in zip(old, new, strict=True))
            unscaled = jnp.where(skip, dtypes.cast(grad, dtype), unscaled)
        results[0].append(new[0])
        results[1].append(unscaled)
        for k, state in zip(used, new[1:], strict=True):
            results[2 + k].append(state)
    return results


def _flat(ctx: Context, results: Sequence[Arrays]) -> list[jax.Array]:
    return [x for group in results for x in group][: len(ctx.out)]


def _adam(decoupled: bool) -> Callable[..., list[jax.Array]]:
    def rule(
        ctx: Context,
        params: Arrays,
        grads: Arrays,
        means: Arrays,
        squares: Arrays,
        max_squares: Arrays,
        steps: Arrays,
        *,
        lr: Any,
        beta1: Any,
        beta2: Any,
        weight_decay: Any,
        eps: Any,
        amsgrad: bool,
        maximize: bool,
        grad_scale: jax.Array | None,
        found_inf: jax.Array | None,
    ) -> list[jax.Array]:
        def update(param: jax.Array, grad: jax.Array, mean: jax.Array, square: jax.Array, *rest: jax.Array) -> Any:
            *largest, step = rest
            rate, b1, b2, decay, tiny = (
                dtypes.cast(x, dtypes.dtype_of(param)) for x in (lr, beta1, beta2, weight_decay, eps)
            )
            grad = -grad if maximize else grad
            if decoupled:
                param = param * (1 - rate * decay)
            else:
                grad = grad + param * decay
            mean = mean + (grad - mean) * (1 - b1)
            square = square * b2 + grad * grad * (1 - b2)
            largest = [lax.max(largest[0], square)] if amsgrad else largest
            scale = lax.sqrt(largest[0] if amsgrad else square) / lax.sqrt(1 - lax.pow(b2, step)) + tiny
            return param - rate / (1 - lax.pow(b1, step)) * mean / scale, mean, square, *largest

        return _flat(ctx, _each(update, params, grads, (means, squares, max_squares), steps, grad_scale, found_inf))

    return rule


lowers("aten._fused_adam.default", "aten._fused_adam.tensor_lr")(_adam(decoupled=False))
lowers("aten._fused_adamw.default", "aten._fused_adamw.tensor_lr")(_adam(decoupled=True))


@lowers("aten._fused_sgd.default", "aten._fused_sgd.tensor_lr")
def _fused_sgd(
    ctx: Context,
    params: Arrays,
    grads: Arrays,
    buffers: Arrays,
    *,
    weight_decay: Any,
    momentum: Any,
    lr: Any,
    dampening: Any,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: jax.Array | None,
    found_inf: jax.Array | None,
) -> list[jax.Array]:
    def update(param: jax.Array, grad: jax.Array, *buffer: jax.Array) -> tuple[jax.Array, ...]:
        rate, decay, keep, damp = (
            dtypes.cast(x, dtypes.dtype_of(param)) for x in (lr, weight_decay, momentum, dampening)
        )
        grad = (-grad if maximize else grad) + decay * param
        if not buffer:
            return (param - rate * grad,)
        new = grad if is_first_step else keep * buffer[0] + (1 - damp) * grad
        return param - rate * (grad + keep * new if nesterov else new), new

    return _flat(ctx, _each(update, params, grads, (buffers,), None, grad_scale, found_inf))


@lowers("aten._fused_adagrad.default", "aten._fused_adagrad.tensor_lr")
def _fused_adagrad(
    ctx: Context,
    params: Arrays,
    grads: Arrays,
    sums: Arrays,
    steps: Arrays,
    *,
    lr: Any,
    lr_decay: Any,
    weight_decay: Any,
    eps: Any,
    maximize: bool,
    grad_scale: jax.Array | None,
    found_inf: jax.Array | None,
) -> list[jax.Array]:
    def update(param: jax.Array, grad: jax.Array, total: jax.Array, step: jax.Array) -> tuple[jax.Array, ...]:
        rate, slowdown, decay, tiny = (
            dtypes.cast(x, dtypes.dtype_of(param)) for x in (lr, lr_decay, weight_decay, eps)
        )
        grad = (-grad if maximize else grad) + decay * param
        total = total + grad * grad
        return param - rate / (1 + (step - 1) * slowdown) * grad / (lax.sqrt(total) + tiny), total

    return _flat(ctx, [*_each(update, params, grads, (sums,), steps, grad_scale, found_inf), steps])


# Loss scaling.


@lowers("aten._amp_foreach_non_finite_check_and_unscale.default")
def _unscale(ctx: Context, grads: Arrays, found_inf: jax.Array, inverse_scale: jax.Array) -> list[jax.Array]:
    bad = [jnp.any(~jnp.isfinite(grad)) for grad in grads]
    overflow = jnp.where(jnp.stack(bad).any(), jnp.ones_like(found_inf), found_inf) if bad else found_inf
    return [*(dtypes.widen(grad) * dtypes.widen(inverse_scale).reshape(()) for grad in grads), overflow]


@lowers("aten._amp_update_scale.default")
def _update_scale(
    ctx: Context,
    scale: jax.Array,
    tracker: jax.Array,
    found_inf: jax.Array,
    growth: float,
    backoff: float,
    interval: int,
) -> tuple[jax.Array, jax.Array]:
    overflow = found_inf.reshape(scale.shape) != 0
    streak = tracker + 1
    due = streak == interval
    # Growth stops where the scale itself would overflow.
    grown = jnp.where(due & jnp.isfinite(scale * growth), scale * growth, scale)
    zero = jnp.zeros_like(tracker)
    return jnp.where(overflow, scale * backoff, grown), jnp.where(overflow | due, zero, streak)
