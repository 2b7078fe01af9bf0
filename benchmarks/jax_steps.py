"""Hand-written JAX training steps of workloads (a), (b) and (c): the yardstick for a step's time.

Written as a JAX programmer would: one jitted, donating function for forward, backward and optimizer; images in NHWC;
fused attention; the learning-rate schedule inside the step. Weights and data come from the torch workloads, so the
losses agree with theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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

    def __init__(self, function: StepFunction, state: State, batches: list[tuple[Array, ...]]) -> None:
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


def _array(tensor: torch.Tensor) -> Array:
    value = tensor.detach().cpu().numpy()
    return jnp.asarray(value.astype(np.int32) if value.dtype == np.int64 else value)


def _parameters(model: torch.nn.Module) -> Params:
    return {name: _array(value) for name, value in model.named_parameters()}


def _zeros(params: Params) -> Params:
    return jax.tree.map(jnp.zeros_like, params)


def _cross_entropy(scores: Array, labels: Array) -> Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), labels[..., None], -1).mean()


def _sgd(
    params: Params, grads: Params, momenta: Params, rate: float, momentum: float, decay: float = 0.0
) -> tuple[Params, Params]:
    momenta = jax.tree.map(lambda m, g, p: momentum * m + g + decay * p, momenta, grads, params)
    return jax.tree.map(lambda p, m: p - rate * m, params, momenta), momenta


def _layer_norm(x: Array, weight: Array, bias: Array) -> Array:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.square(x - mean).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * weight + bias


# (a) ------------------------------------------------------------------------------------------------------------------


def _mlp_loss(params: Params, x: Array, y: Array) -> Array:
    for i in range(20):
        x = x @ params[f"{i}.0.weight"].T + params[f"{i}.0.bias"]
        x = jax.nn.gelu(_layer_norm(x, params[f"{i}.1.weight"], params[f"{i}.1.bias"]), approximate=False)
    return jnp.square(x - y).mean()


def _mlp_step(state: State, x: Array, y: Array) -> tuple[State, Array]:
    params, momenta = state
    loss, grads = jax.value_and_grad(_mlp_loss)(params, x, y)
    return _sgd(params, grads, momenta, 0.01, 0.9), loss


def mlp() -> JaxStep:
    model = workloads.mlp_model()
    params = _parameters(model)
    batches = [tuple(map(_array, batch)) for batch in workloads.mlp_batches()]
    return JaxStep(_mlp_step, (params, _zeros(params)), batches)


# (b) ------------------------------------------------------------------------------------------------------------------


def _conv(x: Array, weight: Array, stride: int) -> Array:
    pad = weight.shape[0] // 2
    return lax.conv_general_dilated(
        x, weight, (stride, stride), [(pad, pad)] * 2, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _batch_norm(params: Params, stats: Params, new: Params, name: str, x: Array) -> Array:
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    count = x.size // x.shape[-1]
    new[f"{name}.running_mean"] = 0.9 * stats[f"{name}.running_mean"] + 0.1 * mean
    new[f"{name}.running_var"] = 0.9 * stats[f"{name}.running_var"] + 0.1 * variance * (count / (count - 1))
    return (x - mean) * (lax.rsqrt(variance + 1e-5) * params[f"{name}.weight"]) + params[f"{name}.bias"]


def _resnet_loss(params: Params, stats: Params, x: Array, y: Array) -> tuple[Array, Params]:
    new: Params = {}
    norm = partial(_batch_norm, params, stats, new)
    x = jax.nn.relu(norm("bn1", _conv(x, params["conv1.weight"], 2)))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0)))
    for i in range(8):
        block = f"blocks.{i}"
        stride = 2 if i in (2, 4, 6) else 1
        z = jax.nn.relu(norm(f"{block}.bn1", _conv(x, params[f"{block}.conv1.weight"], stride)))
        z = norm(f"{block}.bn2", _conv(z, params[f"{block}.conv2.weight"], 1))
        if stride == 2:
            x = norm(f"{block}.shortcut.1", _conv(x, params[f"{block}.shortcut.0.weight"], 2))
        x = jax.nn.relu(z + x)
    return _cross_entropy(x.mean((1, 2)) @ params["fc.weight"].T + params["fc.bias"], y), new


def _resnet_step(state: State, x: Array, y: Array) -> tuple[State, Array]:
    params, momenta, stats = state
    (loss, stats), grads = jax.value_and_grad(_resnet_loss, has_aux=True)(params, stats, x, y)
    return (*_sgd(params, grads, momenta, workloads.RESNET_RATE, 0.9, 5e-4), stats), loss


def resnet() -> JaxStep:
    model = workloads.resnet_model()
    params = {
        name: jnp.transpose(value, (2, 3, 1, 0)) if value.ndim == 4 else value
        for name, value in _parameters(model).items()
    }
    stats = {name: _array(value) for name, value in model.named_buffers() if "running" in name}
    batches = [(_array(x.permute(0, 2, 3, 1).contiguous()), _array(y)) for x, y in workloads.resnet_batches()]
    return JaxStep(_resnet_step, (params, _zeros(params), stats), batches)


# (c) ------------------------------------------------------------------------------------------------------------------


def _gpt2_loss(params: Params, tokens: Array) -> Array:
    batch, length = tokens.shape
    p = {name.removeprefix("transformer."): value for name, value in params.items()}
    x = p["wte.weight"][tokens] + p["wpe.weight"][:length]
    for i in range(6):
        h = f"h.{i}"
        y = _layer_norm(x, p[f"{h}.ln_1.weight"], p[f"{h}.ln_1.bias"])
        qkv = y @ p[f"{h}.attn.c_attn.weight"] + p[f"{h}.attn.c_attn.bias"]
        q, k, v = qkv.reshape(batch, length, 3, 8, 32).transpose(2, 0, 1, 3, 4)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(batch, length, 256)
        x = x + y @ p[f"{h}.attn.c_proj.weight"] + p[f"{h}.attn.c_proj.bias"]
        y = _layer_norm(x, p[f"{h}.ln_2.weight"], p[f"{h}.ln_2.bias"])
        y = jax.nn.gelu(y @ p[f"{h}.mlp.c_fc.weight"] + p[f"{h}.mlp.c_fc.bias"], approximate=True)
        x = x + y @ p[f"{h}.mlp.c_proj.weight"] + p[f"{h}.mlp.c_proj.bias"]
    x = _layer_norm(x, p["ln_f.weight"], p["ln_f.bias"])
    return _cross_entropy(x[:, :-1] @ p["wte.weight"].T, tokens[:, 1:])


def _gpt2_step(state: State, tokens: Array) -> tuple[State, Array]:
    params, first, second, count = state
    loss, grads = jax.value_and_grad(_gpt2_loss)(params, tokens)
    rate = workloads.GPT2_RATE * 0.5 * (1 + jnp.cos(jnp.pi * count / workloads.GPT2_STEPS))
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
    return (params, first, second, count), loss


def gpt2() -> JaxStep:
    params = _parameters(workloads.gpt2_model())
    batches = [(_array(tokens),) for tokens in workloads.licence_tokens(4, 128)]
    return JaxStep(_gpt2_step, (params, _zeros(params), _zeros(params), jnp.zeros(())), batches)


STEPS: dict[str, Callable[[], JaxStep]] = {"mlp": mlp, "resnet": resnet, "gpt2": gpt2}
