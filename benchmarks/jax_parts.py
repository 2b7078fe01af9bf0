"""What the hand-written JAX steps share: how a step is run, optimizers and layers, and torch's tensors as arrays."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array, lax

from benchmarks import workloads

Params = dict[str, Array]
State = tuple[Any, ...]
StepFunction = Callable[..., tuple[Any, Array]]


class JaxStep:
    """A jitted step with its state and data; `step()` dispatches one and returns its loss without waiting."""

    def __init__(self, function: StepFunction, state: Any, batches: list[tuple[Any, ...]]) -> None:
        self._function = jax.jit(function, donate_argnums=0)
        self.state = state
        self._source = cycle(batches)

    def step(self) -> Array:
        self.state, loss = self._function(self.state, *next(self._source))
        return loss

    def pipelined(self, steps: int) -> float:
        """Seconds of one of so many steps, waited for at their end."""
        start = perf_counter()
        for _ in range(steps):
            loss = self.step()
        jax.block_until_ready((loss, self.state))
        return (perf_counter() - start) / steps


def array(tensor: torch.Tensor) -> Array:
    value = tensor.detach().cpu().numpy()
    return jnp.asarray(value.astype(np.int32) if value.dtype == np.int64 else value)


def parameters(model: torch.nn.Module) -> Params:
    return {name: array(value) for name, value in model.named_parameters()}


def zeros(params: Params) -> Params:
    return jax.tree.map(jnp.zeros_like, params)


def cross_entropy(scores: Array, labels: Array) -> Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), labels[..., None], -1).mean()


def sgd(
    params: Params, grads: Params, momenta: Params, rate: float, momentum: float, decay: float = 0.0
) -> tuple[Params, Params]:
    momenta = jax.tree.map(lambda m, g, p: momentum * m + g + decay * p, momenta, grads, params)
    return jax.tree.map(lambda p, m: p - rate * m, params, momenta), momenta


def adamw(
    params: Params, first: Params, second: Params, count: Array, grads: Params, rate: float | Array
) -> tuple[Params, Params, Params, Array]:
    count = count + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, grads)
    fix1, fix2 = 1 - 0.9**count, 1 - 0.999**count
    params = jax.tree.map(
        lambda p, m, v: p * (1 - rate * 0.01) - rate / fix1 * m / (jnp.sqrt(v) / jnp.sqrt(fix2) + 1e-8),
        params,
        first,
        second,
    )
    return params, first, second, count


def language_model(function: StepFunction, model: torch.nn.Module) -> JaxStep:
    """Its training by AdamW on the licence's text."""
    params = parameters(model)
    batches = [(array(tokens),) for tokens in workloads.licence_tokens(4, 128)]
    return JaxStep(function, (params, zeros(params), zeros(params), jnp.zeros(())), batches)


def channels_last(params: Params) -> Params:
    """With the weights of convolutions in the order that NHWC wants."""
    return {name: jnp.transpose(value, (2, 3, 1, 0)) if value.ndim == 4 else value for name, value in params.items()}


def layer_norm(x: Array, weight: Array, bias: Array) -> Array:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * weight + bias


def conv(x: Array, weight: Array, stride: int) -> Array:
    pad = weight.shape[0] // 2
    return lax.conv_general_dilated(
        x, weight, (stride, stride), [(pad, pad)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
