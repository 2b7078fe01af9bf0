"""Buffers with values: JAX's arrays, and what is done with them; `shapes` is the other kind."""

from __future__ import annotations

import functools
import itertools
import math
import mmap
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from torch_xla import _events
from torch_xla._core.device import client, failures, placement

CAN_LOAD = True  # programs that were compiled earlier
_UNTOUCHED = 1 << 20  # bytes from which zeros are pages of their own
_calls_by_signature: Counter[tuple[Any, ...]] = Counter()  # how often what was packed and unpacked, by signature


def put(aval: Any, sharding: Any, parts: Sequence[Any], devices: Sequence[Any]) -> Any:
    """A buffer of NumPy arrays, one for each of some devices, which must not be changed afterwards.

    It is what `jax.device_put` comes to, in an eighth of its time: a learning rate that changes is put at each step.
    """
    from torch_xla import _jax_internals

    return _jax_internals.batched_device_put(aval, sharding, parts, devices, enable_x64=True)


def own_values(values: torch.Tensor) -> torch.Tensor:
    """A CPU tensor's values in memory that nobody else has.

    On CPU the client keeps aligned host memory instead of copying it: PyTorch's is aligned, NumPy's mostly not.
    """
    return values.clone(memory_format=torch.contiguous_format)


def filled(shape: tuple[int, ...], dtype: torch.dtype, number: Any) -> Any:
    """A NumPy array to be put, which holds one number everywhere."""
    import numpy as np

    from torch_xla.ops.fallback import to_numpy

    one = to_numpy(torch.full((), number, dtype=dtype))
    size = math.prod(shape) * one.itemsize
    if size < _UNTOUCHED or any(one.tobytes()):
        return to_numpy(torch.full(shape, number, dtype=dtype))
    # An optimizer's state is as large as its model: pages of zeros that no one touches take neither time nor memory.
    # They are the kernel's, as the C library would clear what it keeps.
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, one.dtype).reshape(shape)


def copies(buffers: Sequence[Any]) -> list[Any]:
    """A copy of each buffer, on its device; compiles nothing."""
    import jax

    if client.spmd() and client.devices_of_job():
        return [_copied_parts(buffer) for buffer in buffers]
    with client.x64():
        copied = jax.device_put([placement.local_array(buffer) for buffer in buffers], may_alias=False)
    return [placement.global_array(part) for part in copied]


def _copied_parts(buffer: Any) -> Any:
    import jax

    from torch_xla import _jax_internals

    with client.x64():
        parts = jax.device_put([shard.data for shard in buffer.addressable_shards], may_alias=False)
    copied_array = _jax_internals.ArrayImpl(buffer.aval, buffer.sharding, parts, committed=True, _skip_checks=True)
    if hasattr(buffer, "origin"):
        copied_array.origin = buffer.origin
    return copied_array


def part(buffer: Any, start: int, shape: Sequence[int]) -> Any:
    """Elements of a flat buffer from a place on, as a buffer of a shape."""
    with client.x64():
        return placement.global_array(placement.local_array(buffer)[start : start + math.prod(shape)].reshape(shape))


def member(stack: Any, index: int) -> Any:
    """One of an array's members as a buffer of its own."""
    with client.x64():
        return placement.global_array(_programs().member(placement.local_array(stack), index))


@functools.cache
def _programs() -> SimpleNamespace:
    """What JAX compiles for each signature that it is asked for."""
    import jax
    import jax.numpy as jnp

    return SimpleNamespace(
        member=jax.jit(lambda stack, index: jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)),
        joined=jax.jit(lambda buffers: jnp.concatenate([buffer.reshape(-1) for buffer in buffers])),
        stacked=jax.jit(jnp.stack),
        split=jax.jit(_parts, static_argnums=1),
    )


# Small buffers travel as one: a run then takes one in place of hundreds.


def pack(buffers: Sequence[Any]) -> Any:
    """Several buffers of one dtype end to end in one."""
    import numpy as np

    buffers = [placement.local_array(buffer) for buffer in buffers]
    # The first step's weights came from the host a moment ago, and a program for this would be one more to compile.
    if all(buffer.is_ready() for buffer in buffers):
        joined = np.concatenate([np.asarray(buffer).reshape(-1) for buffer in buffers])
        with client.x64():
            return placement.global_array(_put([joined], buffers[0])[0])
    earlier = _count_wanted("pack", tuple((buffer.shape, buffer.dtype) for buffer in buffers), buffers[0].sharding)
    with client.x64(), _compiling(earlier == 0):
        return placement.global_array(_programs().joined(list(buffers)))


def stack(buffers: Sequence[Any]) -> Any:
    """Several buffers of one shape and dtype as an array of them."""
    if client.is_own_cpu():
        return pack(buffers).reshape(len(buffers), *buffers[0].shape)
    buffers = [placement.local_array(buffer) for buffer in buffers]
    with client.x64():
        return placement.global_array(_programs().stacked(list(buffers)))


def unpack(buffer: Any, shapes: tuple[tuple[int, ...], ...]) -> list[Any]:
    """The parts of a packed buffer, each as one of its own."""
    import numpy as np

    buffer = placement.local_array(buffer)
    earlier = _count_wanted("unpack", (buffer.dtype, shapes), buffer.sharding)
    if earlier == 0:
        # Parts that are wanted once, for an evaluation say: a program would take XLA 10 ms for each of hundreds.
        failures.finish(buffer)
        with client.x64():
            parts = _put(_parts(np.array(buffer), shapes), buffer)
    else:
        with client.x64(), _compiling(earlier == 1):
            parts = _programs().split(buffer, shapes)
    return [placement.global_array(part) for part in parts]


def _put(values: list[Any], like: Any) -> list[Any]:
    """Arrays of the host where one of a device is."""
    import jax

    if client.spmd():
        place = placement.of(0)
        avals = [jax.core.ShapedArray(value.shape, value.dtype) for value in values]
        local = list(place.local)
        return [put(a, place.at(0, a.shape), [v] * len(local), local) for a, v in zip(avals, values, strict=True)]
    arrays: list[Any] = jax.device_put(values, like.sharding)
    return arrays


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


# Programs.


def starter(loaded: Any, avals: Sequence[Any], shardings: Sequence[Any]) -> Callable[..., tuple[Any, ...] | None]:
    """A function that starts a program, as JAX starts its own compiled functions.

    It takes the input buffers and gives the results, without waiting for them; or gives None, without having started
    anything, the first time that it sees such buffers. It makes an array per result in 1 us, where the executable's own
    method takes 2 to 4, and runs no Python code. Raises RuntimeError if an input was deleted.
    """
    from torch_xla import _jax_internals

    registry = _jax_internals.dispatch_registry
    structure = registry.flatten((0,) * len(avals))[1]

    def prepare(*buffers: Any) -> tuple[None, _jax_internals.MeshExecutableFastpathData, bool]:
        for i, buffer in enumerate(buffers):
            if buffer.is_deleted():
                raise RuntimeError(f"[run] input {i}, {buffer.aval}, is gone: something outside torch_xla deleted it")
        how = _jax_internals.MeshExecutableFastpathData(
            xla_executable=loaded,
            out_pytree_def=structure,
            in_shardings=[buffer.sharding for buffer in buffers],
            out_shardings=shardings,
            out_avals=avals,
            out_committed=[True] * len(avals),
            kept_var_bitvec=[True] * len(buffers),
            in_device_local_layouts=[None] * len(buffers),
            const_args=[],
        )
        return None, how, False

    keys = _jax_internals.JitGlobalCppCacheKeys()
    started: Callable[..., tuple[Any, ...] | None] = _jax_internals.pjit(
        "torch_xla", None, prepare, [], [], keys, registry, _jax_internals.cc_shard_arg
    )
    return started


def compile(client: Any, module: Any, devices: Any, options: Any, host_callbacks: Any) -> Any:
    """Compiles a module with options that say which devices run it."""
    return client.compile_and_load(module, devices, options, host_callbacks=host_callbacks)
