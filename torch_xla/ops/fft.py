"""Rules for Fourier transforms."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torch_xla.ops.registry import Context, lowers


def _normalization(values: jax.Array, sizes: Sequence[int], mode: int) -> jax.Array:
    """PyTorch's FFT normalization: 0 none, 1 by the square root of the length, 2 by the length."""
    length = math.prod(sizes)
    return values if mode == 0 else values / (math.sqrt(length) if mode == 1 else length)


def _transform(x: jax.Array, dims: Sequence[int], forward: bool) -> jax.Array:
    """Complex FFT over any number of dimensions, without normalization."""
    for d in dims:
        x = _along(x, d, forward)
    return x


def _along(x: jax.Array, axis: int, forward: bool) -> jax.Array:
    """Complex FFT over one dimension of complex or real numbers, without normalization."""

    def usual(x: jax.Array) -> jax.Array:
        return jnp.fft.fft(x, axis=axis) if forward else jnp.fft.ifft(x, axis=axis, norm="forward")

    def by_factors(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(_by_factors(jnp.moveaxis(x.astype(np.complex128), axis, -1), forward), -1, axis)

    if x.dtype not in (np.float64, np.complex128) or x.size == 0:
        return usual(x)
    # XLA has no transforms of doubles for TPUs.
    return lax.platform_dependent(x, tpu=by_factors, default=usual)


def _by_factors(x: jax.Array, forward: bool) -> jax.Array:
    """FFT over the last dimension by the prime factors of its length (Cooley and Tukey, 1965)."""
    n = x.shape[-1]
    if n == 1:
        return x
    factor = next((p for p in range(2, math.isqrt(n) + 1) if n % p == 0), n)
    turn = (-2j if forward else 2j) * np.pi
    members, rest = np.arange(factor), np.arange(n // factor)
    parts = jnp.swapaxes(jnp.reshape(x, (*x.shape[:-1], n // factor, factor)), -1, -2)
    parts = _by_factors(parts, forward) * np.exp(turn / n * np.outer(members, rest))
    roots = np.exp(turn / factor * (np.outer(members, members) % factor))
    return jnp.reshape(jnp.sum(roots[:, :, None] * parts[..., None, :, :], axis=-2), x.shape)


@lowers("aten._fft_c2c.default")
def _fft_c2c(ctx: Context, x: jax.Array, dims: Sequence[int], normalization: int, forward: bool) -> jax.Array:
    return _normalization(_transform(x, dims, forward), [x.shape[d] for d in dims], normalization)


@lowers("aten._fft_r2c.default")
def _fft_r2c(ctx: Context, x: jax.Array, dims: Sequence[int], normalization: int, onesided: bool) -> jax.Array:
    axis = dims[-1]

    def half(x: jax.Array) -> jax.Array:
        return lax.slice_in_dim(_along(x, axis, True), 0, x.shape[axis] // 2 + 1, axis=axis)

    def usual(x: jax.Array) -> jax.Array:
        return jnp.fft.rfft(x, axis=axis)

    if not onesided:
        out = _along(x, axis, True)
    elif x.dtype == np.float64:
        out = lax.platform_dependent(x, tpu=half, default=usual)
    else:
        out = usual(x)
    return _normalization(_transform(out, dims[:-1], True), [x.shape[d] for d in dims], normalization)


@lowers("aten._fft_c2r.default")
def _fft_c2r(ctx: Context, x: jax.Array, dims: Sequence[int], normalization: int, size: int) -> jax.Array:
    axis = dims[-1]

    def full(x: jax.Array) -> jax.Array:
        """By what a half stands for: the other one has the conjugates, the other way round."""
        mirrored = jnp.flip(jnp.conj(lax.slice_in_dim(x, 1, (size + 1) // 2, axis=axis)), axis)
        return jnp.real(_along(jnp.concatenate([x, mirrored], axis=axis), axis, False))

    def usual(x: jax.Array) -> jax.Array:
        return jnp.fft.irfft(x, n=size, axis=axis, norm="forward")

    x = _transform(x, dims[:-1], False)
    fits = x.dtype == np.complex128 and x.shape[axis] == size // 2 + 1
    out = lax.platform_dependent(x, tpu=full, default=usual) if fits else usual(x)
    return _normalization(out, [ctx.meta.shape[d] for d in dims], normalization)
