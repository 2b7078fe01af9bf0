"""Hand-written JAX steps of the workloads: the yardstick for a step's time.

Written as a JAX programmer would: one jitted, donating function for forward, backward and optimizer, or for network and
sampler; images in NHWC; fused attention; the learning-rate schedule inside the step. Weights and data come from the
torch workloads, so the losses agree with theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks import workloads
from benchmarks.jax_parts import (
    JaxStep,
    Params,
    State,
    adamw,
    array,
    channels_last,
    conv,
    cross_entropy,
    language_model,
    layer_norm,
    parameters,
    sgd,
    zeros,
)
from benchmarks.jax_unet import unet

# (a) ------------------------------------------------------------------------------------------------------------------


def _mlp_loss(params: Params, x: Array, y: Array) -> Array:
    for i in range(20):
        x = x @ params[f"{i}.0.weight"].T + params[f"{i}.0.bias"]
        x = jax.nn.gelu(layer_norm(x, params[f"{i}.1.weight"], params[f"{i}.1.bias"]), approximate=False)
    return jnp.square(x - y).mean()


def _mlp_step(state: State, x: Array, y: Array) -> tuple[State, Array]:
    params, momenta = state
    loss, grads = jax.value_and_grad(_mlp_loss)(params, x, y)
    return sgd(params, grads, momenta, 0.01, 0.9), loss


def mlp() -> JaxStep:
    model = workloads.mlp_model()
    params = parameters(model)
    batches = [tuple(map(array, batch)) for batch in workloads.mlp_batches()]
    return JaxStep(_mlp_step, (params, zeros(params)), batches)


# (b) ------------------------------------------------------------------------------------------------------------------


def _batch_norm(params: Params, stats: Params, new: Params, name: str, x: Array) -> Array:
    mean, variance = x.mean((0, 1, 2)), x.var((0, 1, 2))
    count = x.size // x.shape[-1]
    new[f"{name}.running_mean"] = 0.9 * stats[f"{name}.running_mean"] + 0.1 * mean
    new[f"{name}.running_var"] = 0.9 * stats[f"{name}.running_var"] + 0.1 * variance * (count / (count - 1))
    return (x - mean) * (lax.rsqrt(variance + 1e-5) * params[f"{name}.weight"]) + params[f"{name}.bias"]


def _resnet_loss(params: Params, stats: Params, x: Array, y: Array) -> tuple[Array, Params]:
    new: Params = {}
    norm = partial(_batch_norm, params, stats, new)
    x = jax.nn.relu(norm("bn1", conv(x, params["conv1.weight"], 2)))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0)))
    for i in range(8):
        block = f"blocks.{i}"
        stride = 2 if i in (2, 4, 6) else 1
        z = jax.nn.relu(norm(f"{block}.bn1", conv(x, params[f"{block}.conv1.weight"], stride)))
        z = norm(f"{block}.bn2", conv(z, params[f"{block}.conv2.weight"], 1))
        if stride == 2:
            x = norm(f"{block}.shortcut.1", conv(x, params[f"{block}.shortcut.0.weight"], 2))
        x = jax.nn.relu(z + x)
    return cross_entropy(x.mean((1, 2)) @ params["fc.weight"].T + params["fc.bias"], y), new


def _resnet_step(state: State, x: Array, y: Array) -> tuple[State, Array]:
    params, momenta, stats = state
    (loss, stats), grads = jax.value_and_grad(_resnet_loss, has_aux=True)(params, stats, x, y)
    return (*sgd(params, grads, momenta, workloads.RESNET_RATE, 0.9, 5e-4), stats), loss


def resnet() -> JaxStep:
    model = workloads.resnet_model()
    params = channels_last(parameters(model))
    stats = {name: array(value) for name, value in model.named_buffers() if "running" in name}
    batches = [(array(x.permute(0, 2, 3, 1).contiguous()), array(y)) for x, y in workloads.resnet_batches()]
    return JaxStep(_resnet_step, (params, zeros(params), stats), batches)


# (c) ------------------------------------------------------------------------------------------------------------------


def _gpt2_loss(params: Params, tokens: Array) -> Array:
    batch, length = tokens.shape
    p = {name.removeprefix("transformer."): value for name, value in params.items()}
    x = p["wte.weight"][tokens] + p["wpe.weight"][:length]
    for i in range(6):
        h = f"h.{i}"
        y = layer_norm(x, p[f"{h}.ln_1.weight"], p[f"{h}.ln_1.bias"])
        qkv = y @ p[f"{h}.attn.c_attn.weight"] + p[f"{h}.attn.c_attn.bias"]
        q, k, v = qkv.reshape(batch, length, 3, 8, 32).transpose(2, 0, 1, 3, 4)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(batch, length, 256)
        x = x + y @ p[f"{h}.attn.c_proj.weight"] + p[f"{h}.attn.c_proj.bias"]
        y = layer_norm(x, p[f"{h}.ln_2.weight"], p[f"{h}.ln_2.bias"])
        y = jax.nn.gelu(y @ p[f"{h}.mlp.c_fc.weight"] + p[f"{h}.mlp.c_fc.bias"], approximate=True)
        x = x + y @ p[f"{h}.mlp.c_proj.weight"] + p[f"{h}.mlp.c_proj.bias"]
    x = layer_norm(x, p["ln_f.weight"], p["ln_f.bias"])
    return cross_entropy(x[:, :-1] @ p["wte.weight"].T, tokens[:, 1:])


def _gpt2_step(state: State, tokens: Array) -> tuple[State, Array]:
    loss, grads = jax.value_and_grad(_gpt2_loss)(state[0], tokens)
    rate = workloads.GPT2_RATE * 0.5 * (1 + jnp.cos(jnp.pi * state[-1] / workloads.GPT2_STEPS))
    return adamw(*state, grads, rate), loss


def gpt2() -> JaxStep:
    return language_model(_gpt2_step, workloads.gpt2_model())


# (f) ------------------------------------------------------------------------------------------------------------------


def _rms_norm(x: Array, weight: Array) -> Array:
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * weight


def _rotated(x: Array) -> Array:
    """Rotary position embedding of (batch, length, heads, 32)."""
    angles = jnp.arange(x.shape[1])[:, None, None] * 1e4 ** (-jnp.arange(16) / 16)
    low, high = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], -1)


def _llama_loss(params: Params, tokens: Array) -> Array:
    shape = (*tokens.shape, -1, 32)
    x = params["model.embed_tokens.weight"][tokens]
    for i in range(4):
        p = {name.removeprefix(f"model.layers.{i}."): value for name, value in params.items()}
        y = _rms_norm(x, p["input_layernorm.weight"])
        q, k, v = ((y @ p[f"self_attn.{part}_proj.weight"].T).reshape(shape) for part in "qkv")
        y = jax.nn.dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True).reshape(x.shape)
        x = x + y @ p["self_attn.o_proj.weight"].T
        y = _rms_norm(x, p["post_attention_layernorm.weight"])
        y = jax.nn.silu(y @ p["mlp.gate_proj.weight"].T) * (y @ p["mlp.up_proj.weight"].T)
        x = x + y @ p["mlp.down_proj.weight"].T
    return cross_entropy(_rms_norm(x, params["model.norm.weight"])[:, :-1] @ params["lm_head.weight"].T, tokens[:, 1:])


def _llama_step(state: State, tokens: Array) -> tuple[State, Array]:
    loss, grads = jax.value_and_grad(_llama_loss)(state[0], tokens)
    return adamw(*state, grads, workloads.LLAMA_RATE), loss


def llama() -> JaxStep:
    return language_model(_llama_step, workloads.llama_model())


STEPS: dict[str, Callable[[], JaxStep]] = {"mlp": mlp, "resnet": resnet, "gpt2": gpt2, "unet": unet, "llama": llama}
