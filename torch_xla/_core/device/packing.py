"""Concatenates small device buffers, and splits them again: a run then takes one buffer in place of hundreds."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch_xla import _events
from torch_xla._core.device import client, placement, transfer

_calls_by_signature: Counter[tuple[Any, ...]] = Counter()  # how often what was packed and unpacked, by signature


def pack(buffers: Sequence[Any]) -> Any:
    """Several device buffers of one dtype end to end in one."""
    import numpy as np

    buffers = [placement.own_part(buffer) for buffer in buffers]
    # The first step's weights came from the host a moment ago, and a program for this would be one more to compile.
    if all(buffer.is_ready() for buffer in buffers):
        joined = np.concatenate([np.asarray(buffer).reshape(-1) for buffer in buffers])
        with client.x64():
            return placement.with_others(_put([joined], buffers[0])[0])
    earlier = _count_wanted("pack", tuple((buffer.shape, buffer.dtype) for buffer in buffers), buffers[0].sharding)
    with client.x64(), _compiling(earlier == 0):
        return placement.with_others(_joined()(list(buffers)))


def stack(buffers: Sequence[Any]) -> Any:
    """Several device buffers of one shape and dtype as an array of them."""
    if client.is_own_cpu():
        return pack(buffers).reshape(len(buffers), *buffers[0].shape)
    buffers = [placement.own_part(buffer) for buffer in buffers]
    with client.x64():
        return placement.with_others(_stacked()(list(buffers)))


def unpack(buffer: Any, shapes: tuple[tuple[int, ...], ...]) -> list[Any]:
    """The parts of a device buffer, each as one of its own."""
    import numpy as np

    buffer = placement.own_part(buffer)
    earlier = _count_wanted("unpack", (buffer.dtype, shapes), buffer.sharding)
    if earlier == 0:
        # Parts that are wanted once, for an evaluation say: a program would take XLA 10 ms for each of hundreds.
        transfer.finish(buffer)
        with client.x64():
            parts = _put(_parts(np.array(buffer), shapes), buffer)
    else:
        with client.x64(), _compiling(earlier == 1):
            parts = _split()(buffer, shapes)
    return [placement.with_others(part) for part in parts]


def _put(values: list[Any], like: Any) -> list[Any]:
    """Arrays of the host where one of a device is."""
    import jax

    if client.spmd():
        return [transfer.put(value, 0) for value in values]
    put: list[Any] = jax.device_put(values, like.sharding)
    return put


def _parts(values: Any, shapes: tuple[tuple[int, ...], ...]) -> list[Any]:
    starts = itertools.accumulate((math.prod(shape) for shape in shapes), initial=0)
    return [values[i : i + math.prod(shape)].reshape(shape) for i, shape in zip(starts, shapes, strict=False)]


def _count_wanted(*signature: Any) -> int:
    """How often this signature was counted before."""
    _calls_by_signature[signature] += 1
    return _calls_by_signature[signature] - 1


def _compiling(first: bool) -> AbstractContextManager[Any]:
    """Shows in profiles that JAX compiles something small of its own, as it does once per signature."""
    return _events.span("packing") if first else nullcontext()


@functools.cache
def _joined() -> Any:
    import jax
    import jax.numpy as jnp

    return jax.jit(lambda buffers: jnp.concatenate([buffer.reshape(-1) for buffer in buffers]))


@functools.cache
def _stacked() -> Any:
    import jax
    import jax.numpy as jnp

    return jax.jit(jnp.stack)


@functools.cache
def _split() -> Any:
    import jax

    return jax.jit(_parts, static_argnums=1)
