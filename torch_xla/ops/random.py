"""Random numbers. Every operator call draws from its own key, made from the program's seed and a running offset."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from torch_xla.ops import dtypes, host_kernel
from torch_xla.ops.registry import Context, Meta, lowers

# Random integers of a floating type fill the range where every whole number has a representation.
_MANTISSA_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}


def _wide(ctx: Context) -> np.dtype:
    """The type to draw in: float32 for half types and integers."""
    return dtypes.numpy_dtype(dtypes.opmath(dtypes.to_float(ctx.meta.dtype)))


def _unit(ctx: Context, dtype: Any = None) -> jax.Array:
    """Uniform numbers in [0, 1)."""
    return jax.random.uniform(ctx.key(), ctx.meta.shape, _wide(ctx) if dtype is None else dtype)


def _open_unit(ctx: Context) -> jax.Array:
    """Uniform numbers in (0, 1)."""
    dtype = _wide(ctx)
    return jax.random.uniform(ctx.key(), ctx.meta.shape, dtype, minval=jnp.finfo(dtype).tiny)


def _normal(ctx: Context) -> jax.Array:
    dtype = dtypes.numpy_dtype(dtypes.opmath(ctx.meta.dtype))
    return jax.random.normal(ctx.key(), ctx.meta.shape, dtype)


# Uniform.


@lowers("aten.rand.default", "aten.rand.generator", "aten.rand_like.default", "aten.rand_like.generator")
def _rand(ctx: Context, like: Any, **_: Any) -> jax.Array:
    # Drawn in the result's type: rounding a float32 below 1 to a half type could give 1.
    dtype = dtypes.numpy_dtype(ctx.meta.dtype)
    if ctx.meta.dtype.is_complex:
        pair = jax.random.uniform(ctx.key(), (*ctx.meta.shape, 2), np.zeros(0, dtype).real.dtype)
        return lax.complex(pair[..., 0], pair[..., 1])
    return _unit(ctx, dtype)


@lowers("aten.uniform.default")
def _uniform(ctx: Context, x: jax.Array, low: Any, high: Any, *, generator: Any) -> jax.Array:
    dtype = ctx.meta.dtype
    if dtype.is_complex:  # both parts are drawn
        real = Meta((*ctx.meta.shape, 2), dtype.to_real())
        parts = _uniform(Context(ctx.op, (real,), ctx.seed), x, low, high, generator=generator)
        return lax.complex(parts[..., 0], parts[..., 1])
    low, high = dtypes.cast(low, dtype), dtypes.cast(high, dtype)
    drawn = low + _unit(ctx, dtypes.numpy_dtype(dtype)) * (high - low)
    # The upper end is excluded, but rounding may reach it.
    return jnp.where(drawn == high, low, drawn)


# Normal.


@lowers("aten.randn.default", "aten.randn.generator", "aten.randn_like.default", "aten.randn_like.generator")
def _randn(ctx: Context, like: Any, **_: Any) -> jax.Array:
    return _normal(ctx)


@lowers("aten.normal_functional.default")
def _normal_functional(ctx: Context, x: jax.Array, mean: Any, std: Any, *, generator: Any) -> jax.Array:
    drawn = _normal(ctx)
    dtype = dtypes.dtype_of(drawn)
    return dtypes.cast(mean, dtype) + dtypes.cast(std, dtype) * drawn


@lowers("aten.normal.Tensor_Tensor", "aten.normal.Tensor_float", "aten.normal.float_Tensor", "aten.normal.float_float")
def _normal_of(ctx: Context, mean: Any, std: Any, size: Any = None, *, generator: Any, **_: Any) -> jax.Array:
    return _normal_functional(ctx, ctx, mean, std, generator=generator)


@lowers("aten.log_normal.default")
def _log_normal(ctx: Context, x: jax.Array, mean: Any, std: Any, *, generator: Any) -> jax.Array:
    return lax.exp(_normal_functional(ctx, x, mean, std, generator=generator))


# Integers.


def _integers(ctx: Context, *bounds: Any) -> jax.Array:
    """From the first bound, or 0 where there is but one, to the last, which is excluded."""
    low, high = (dtypes.cast(bound, torch.int64) for bound in (0, *bounds)[-2:])
    return jax.random.randint(ctx.key(), ctx.meta.shape, low, high, dtype=jnp.int64)


@lowers("aten.randint.default", "aten.randint.generator", "aten.randint.low", "aten.randint.low_generator")
def _randint(ctx: Context, *bounds_and_size: Any, **_: Any) -> jax.Array:
    return _integers(ctx, *bounds_and_size[:-1])


@lowers(
    "aten.randint_like.default",
    "aten.randint_like.generator",
    "aten.randint_like.Tensor",
    "aten.randint_like.Tensor_generator",
    "aten.randint_like.low_dtype",
    "aten.randint_like.low_generator_dtype",
    "aten.random.to",
)
def _randint_like(ctx: Context, x: jax.Array, *bounds: Any, **_: Any) -> jax.Array:
    return _integers(ctx, *bounds)


@lowers("aten.random.default", "aten.random.from")
def _random(ctx: Context, x: jax.Array, start: int = 0, end: int | None = None, *, generator: Any) -> jax.Array:
    return _integers(ctx, start, _end_of(ctx.meta.dtype) if end is None else end)


def _end_of(dtype: torch.dtype) -> int:
    """Excluded end of the integers that `random_` draws for a type."""
    if dtype == torch.bool:
        return 2
    if dtype in _MANTISSA_BITS:
        return 2 ** _MANTISSA_BITS[dtype] + 1
    return min(torch.iinfo(dtype).max + 1, 2**63 - 1)


# `torch.randperm` arrives in its out form, which has no functional twin of the same arguments.
@lowers("aten.randperm.default", "aten.randperm.generator", "aten.randperm.out", "aten.randperm.generator_out")
def _randperm(ctx: Context, n: int, **_: Any) -> jax.Array:
    # Of 63 bits each: that two are equal is as good as impossible, and JAX's own way sorts 32 bits several times.
    keys = lax.shift_right_logical(jax.random.bits(ctx.key(), (n,), np.uint64), np.uint64(1)).astype(np.int64)
    meta = Meta((n,), torch.int64)
    options = {"stable": True, "dim": 0, "descending": False}
    results = host_kernel.attempt(torch.ops.aten.sort.stable, (keys,), options, (meta, meta))
    return results[1] if results else lax.sort((keys, lax.iota(np.int64, n)), num_keys=1)[1]


# Coins and dropout.


@lowers("aten.bernoulli.default")
def _bernoulli(ctx: Context, p: jax.Array, *, generator: Any) -> jax.Array:
    p = dtypes.widen(p, floating=True)
    return _unit(ctx, p.dtype) < p


@lowers("aten.bernoulli.p", "aten.bernoulli.Tensor")
def _bernoulli_of(ctx: Context, x: jax.Array, p: Any, *, generator: Any) -> jax.Array:
    return _unit(ctx) < dtypes.cast(p, dtypes.torch_dtype(_wide(ctx)))


@lowers("aten.native_dropout.default")
def _native_dropout(ctx: Context, x: jax.Array, p: float, train: bool | None) -> tuple[jax.Array, jax.Array]:
    if train is False or p == 0:
        return x, jnp.ones(x.shape, bool)
    if p == 1:
        return jnp.zeros_like(x), jnp.zeros(x.shape, bool)
    real = jnp.finfo(_wide(ctx)).dtype
    keep = _unit(ctx, real) < 1.0 - p  # the draw of `bernoulli`, which dropout is made of where nothing traces it
    return jnp.where(keep, dtypes.widen(x) * (1.0 / (1.0 - p)), 0), keep


@lowers("aten.native_dropout_backward.default")
def _native_dropout_backward(ctx: Context, grad: jax.Array, mask: jax.Array, scale: float) -> jax.Array:
    return jnp.where(mask, dtypes.widen(grad) * scale, 0)


@lowers("aten.rrelu_with_noise_functional.default")
def _rrelu(
    ctx: Context, x: jax.Array, noise: jax.Array, lower: Any, upper: Any, training: bool, generator: Any
) -> tuple[jax.Array, jax.Array]:
    wide = dtypes.widen(x)
    lower, upper = (dtypes.cast(v, dtypes.dtype_of(wide)) for v in (lower, upper))
    if not training:
        return jnp.where(wide <= 0, wide * (lower + upper) / 2, wide), noise
    slope = lower + jax.random.uniform(ctx.key(), x.shape, wide.dtype) * (upper - lower)
    slope = jnp.where(wide <= 0, slope, jnp.ones_like(slope))
    return wide * slope, slope


# Other distributions.


@lowers("aten.exponential.default")
def _exponential(ctx: Context, x: jax.Array, rate: Any, *, generator: Any) -> jax.Array:
    # Never 0: samplers divide by the result.
    drawn = -lax.log(_open_unit(ctx))
    return lax.max(drawn, jnp.full_like(drawn, jnp.finfo(drawn.dtype).tiny)) / dtypes.cast(rate, dtypes.dtype_of(drawn))


@lowers("aten.geometric.default")
def _geometric(ctx: Context, x: jax.Array, p: float, *, generator: Any) -> jax.Array:
    drawn = _open_unit(ctx)
    return jnp.ones_like(drawn) if p == 1 else lax.max(lax.ceil(lax.log(drawn) / math.log1p(-p)), jnp.ones_like(drawn))


@lowers("aten.cauchy.default")
def _cauchy(ctx: Context, x: jax.Array, median: Any, sigma: Any, *, generator: Any) -> jax.Array:
    drawn = lax.tan(math.pi * (_open_unit(ctx) - 0.5))
    dtype = dtypes.dtype_of(drawn)
    return dtypes.cast(median, dtype) + dtypes.cast(sigma, dtype) * drawn


@lowers("aten.multinomial.default")
def _multinomial(ctx: Context, weights: jax.Array, count: int, replacement: bool, *, generator: Any) -> jax.Array:
    logits = lax.log(dtypes.widen(weights, floating=True))
    if replacement or count == 1:
        drawn = jax.random.categorical(ctx.key(), logits, axis=-1, shape=(count, *logits.shape[:-1]))
        return jnp.moveaxis(drawn, 0, -1)
    # The places of the largest perturbed logits are a draw without replacement.
    noise = jax.random.gumbel(ctx.key(), logits.shape, logits.dtype)
    return lax.top_k(logits + noise, count)[1]


@lowers("aten.poisson.default")
def _poisson(ctx: Context, rate: jax.Array, generator: Any) -> jax.Array:
    return jax.random.poisson(ctx.key(), dtypes.widen(rate), dtype=jnp.int64)


@lowers("aten.binomial.default")
def _binomial(ctx: Context, count: jax.Array, p: jax.Array, generator: Any) -> jax.Array:
    count, p = dtypes.promote(count, p, floating=True)
    return jax.random.binomial(ctx.key(), count, p, dtype=p.dtype)


@lowers("aten._standard_gamma.default")
def _standard_gamma(ctx: Context, shape: jax.Array, generator: Any) -> jax.Array:
    shape = dtypes.widen(shape)
    return jax.random.gamma(ctx.key(), shape, dtype=shape.dtype)


@lowers("aten._standard_gamma_grad.default")
def _standard_gamma_grad(ctx: Context, shape: jax.Array, sample: jax.Array) -> jax.Array:
    return lax.random_gamma_grad(*dtypes.promote(shape, sample))


@lowers("aten._sample_dirichlet.default")
def _sample_dirichlet(ctx: Context, concentration: jax.Array, generator: Any) -> jax.Array:
    drawn = _standard_gamma(ctx, concentration, generator)
    return drawn / jnp.sum(drawn, axis=-1, keepdims=True)
