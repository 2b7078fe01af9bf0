"""Barriers that XLA moves no computation across."""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax import lax

from torch_xla.ops.registry import Context, lowers


@lowers("xla.optimization_barrier.default")
def _optimization_barrier(ctx: Context, tensors: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    return lax.optimization_barrier(tuple(tensors))
