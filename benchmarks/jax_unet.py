"""Workload (d) in JAX: the network of `workloads.unet_parts` and a step of DDIM, in one jitted, donating function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from benchmarks import workloads
from benchmarks.jax_parts import JaxStep, Params, array, channels_last, conv, layer_norm, parameters


class UNet:
    """The network over its parameters, by their names in torch; pictures are (batch, height, width, channels)."""

    def __init__(self, params: Params) -> None:
        self._params = params

    def _linear(self, name: str, x: Array) -> Array:
        return x @ self._params[f"{name}.weight"].T + self._params.get(f"{name}.bias", 0.0)

    def _conv(self, name: str, x: Array, stride: int = 1) -> Array:
        return conv(x, self._params[f"{name}.weight"], stride) + self._params[f"{name}.bias"]

    def _group_norm(self, name: str, x: Array, epsilon: float = 1e-5) -> Array:
        groups = x.reshape(*x.shape[:-1], 8, -1)
        mean = groups.mean((1, 2, 4), keepdims=True)
        variance = jnp.square(groups - mean).mean((1, 2, 4), keepdims=True)
        x = ((groups - mean) * lax.rsqrt(variance + epsilon)).reshape(x.shape)
        return x * self._params[f"{name}.weight"] + self._params[f"{name}.bias"]

    def _layer_norm(self, name: str, x: Array) -> Array:
        return layer_norm(x, self._params[f"{name}.weight"], self._params[f"{name}.bias"])

    def _resnet(self, name: str, x: Array, time: Array) -> Array:
        y = self._conv(f"{name}.conv1", jax.nn.silu(self._group_norm(f"{name}.norm1", x)))
        y = y + self._linear(f"{name}.time_emb_proj", time)[:, None, None]
        y = self._conv(f"{name}.conv2", jax.nn.silu(self._group_norm(f"{name}.norm2", y)))
        shortcut = f"{name}.conv_shortcut"
        return y + (self._conv(shortcut, x) if f"{shortcut}.weight" in self._params else x)

    def _attention(self, name: str, x: Array, context: Array) -> Array:
        q, k, v = (
            self._linear(f"{name}.to_{part}", of).reshape(*of.shape[:2], 8, -1)
            for part, of in (("q", x), ("k", context), ("v", context))
        )
        return self._linear(f"{name}.to_out.0", jax.nn.dot_product_attention(q, k, v).reshape(x.shape))

    def _transformer(self, name: str, x: Array, condition: Array) -> Array:
        block = f"{name}.transformer_blocks.0"
        y = self._conv(f"{name}.proj_in", self._group_norm(f"{name}.norm", x, 1e-6))
        y = y.reshape(y.shape[0], -1, y.shape[-1])
        z = self._layer_norm(f"{block}.norm1", y)
        y = y + self._attention(f"{block}.attn1", z, z)
        y = y + self._attention(f"{block}.attn2", self._layer_norm(f"{block}.norm2", y), condition)
        z, gate = jnp.split(self._linear(f"{block}.ff.net.0.proj", self._layer_norm(f"{block}.norm3", y)), 2, -1)
        y = y + self._linear(f"{block}.ff.net.2", z * jax.nn.gelu(gate, approximate=False))
        return x + self._conv(f"{name}.proj_out", y.reshape(x.shape))

    def __call__(self, x: Array, time: Array, condition: Array) -> Array:
        """The noise in `x` at a time (1,)."""
        angles = time[:, None] * jnp.exp(-jnp.log(1e4) * jnp.arange(16) / 16)
        time = self._linear("time_embedding.linear_1", jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1))
        time = jax.nn.silu(self._linear("time_embedding.linear_2", jax.nn.silu(time)))
        skips = [x := self._conv("conv_in", x)]
        x = self._resnet("down_blocks.0.resnets.0", x, time)
        skips.append(x := self._transformer("down_blocks.0.attentions.0", x, condition))
        skips.append(x := self._conv("down_blocks.0.downsamplers.0.conv", x, 2))
        skips.append(x := self._resnet("down_blocks.1.resnets.0", x, time))
        x = self._resnet("mid_block.resnets.0", x, time)
        x = self._resnet("mid_block.resnets.1", self._transformer("mid_block.attentions.0", x, condition), time)
        for i in range(2):
            x = self._resnet(f"up_blocks.0.resnets.{i}", jnp.concatenate([x, skips.pop()], -1), time)
        x = self._conv("up_blocks.0.upsamplers.0.conv", x.repeat(2, 1).repeat(2, 2))
        for i in range(2):
            x = self._resnet(f"up_blocks.1.resnets.{i}", jnp.concatenate([x, skips.pop()], -1), time)
            x = self._transformer(f"up_blocks.1.attentions.{i}", x, condition)
        return self._conv("conv_out", jax.nn.silu(self._group_norm("conv_norm_out", x)))


def step(
    latents: Array, params: Params, noise: Array, condition: Array, time: Array, alpha: Array, after: Array
) -> tuple[Array, Array]:
    """A step of DDIM; `alpha` and `after` are the products of alphas before and after it."""
    latents = jnp.where(time == 1000 - 1000 // workloads.UNET_STEPS, noise, latents)
    predicted = UNet(params)(latents, time, condition)
    clean = jnp.clip((latents - jnp.sqrt(1 - alpha) * predicted) / jnp.sqrt(alpha), -1, 1)
    latents = jnp.sqrt(after) * clean + jnp.sqrt(1 - after) * predicted
    return latents, jnp.square(latents).mean()


def unet() -> JaxStep:
    model, noise, condition = workloads.unet_parts()
    start = array(noise.permute(0, 2, 3, 1).contiguous())
    fixed = (channels_last(parameters(model)), start, array(condition))
    stride = 1000 // workloads.UNET_STEPS
    alphas = np.cumprod(1 - np.linspace(1e-4, 0.02, 1000, dtype=np.float32))
    times = range(1000 - stride, -1, -stride)
    batches = [
        (*fixed, jnp.full(1, t), jnp.asarray(alphas[t]), jnp.asarray(alphas[t - stride] if t else 1.0)) for t in times
    ]
    return JaxStep(step, start + 0, batches)
