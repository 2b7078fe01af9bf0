"""Buffers without values, on devices that are described: a shape, a dtype and a sharding. `arrays` are the others."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_xla import _bindings, _events
from torch_xla._core.device import described

CAN_LOAD = False  # programs that were compiled earlier: there is nothing to load them into
# What its events are called: a program that would have run, a value that is read.
RUN, READ = "described run", "described read"

_in_use: dict[Any, int] = {}  # bytes of buffers that live, by the first device of those that have them


def memory_stats(device: Any) -> dict[str, int]:
    """As a client's statistics: what the buffers take that live, and how much there is."""
    stats = {"bytes_in_use": max(_in_use.get(device, 0), _in_use.get(described.devices()[0], 0))}
    return stats | {"bytes_limit": described.memory()} if described.memory() else stats


@functools.lru_cache(maxsize=4096)
def _held(sharding: Any, shape: tuple[int, ...], itemsize: int) -> tuple[Any, int]:
    return sharding._device_assignment[0], math.prod(sharding.shard_shape(shape)) * itemsize


class Buffer:
    """A buffer of described devices. It has what this package asks of JAX's arrays, and zeros for values."""

    is_fully_addressable = True  # zeros are known everywhere
    is_fully_replicated = True
    committed = True
    copy_to_host_async: Any = staticmethod(lambda: None)  # zeros are here

    def __init__(self, aval: Any, sharding: Any) -> None:
        self.aval = aval
        self.sharding = sharding
        self.shape: tuple[int, ...] = aval.shape
        self.dtype: Any = aval.dtype
        self.ndim = len(aval.shape)
        self._device, self.bytes_on_device = _held(sharding, aval.shape, aval.dtype.itemsize)
        _in_use[self._device] = _in_use.get(self._device, 0) + self.bytes_on_device

    def __del__(self, in_use: dict[Any, int] = _in_use) -> None:  # which is gone at the end of the process
        if hasattr(self, "bytes_on_device"):
            in_use[self._device] -= self.bytes_on_device

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * int(self.dtype.itemsize)

    def devices(self) -> set[Any]:
        """The devices that have parts of it."""
        return set(self.sharding.device_set)

    @property
    def addressable_shards(self) -> list[Any]:
        """The parts on each device."""
        return [_Shard(device, index, self) for device, index in self.sharding.devices_indices_map(self.shape).items()]

    def block_until_ready(self) -> Buffer:
        """Returns at once."""
        return self

    def is_ready(self) -> bool:
        """Whether it is there: always."""
        return True

    def is_deleted(self) -> bool:
        """Whether it is gone: never."""
        return False

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy as np

        _events.mark(READ, _bindings.user_frame(), self.aval)
        return np.zeros(self.shape, self.dtype if dtype is None else dtype)


class _Shard:
    def __init__(self, device: Any, index: tuple[slice, ...], whole: Buffer) -> None:
        import jax

        self.device, self.index = device, index
        shape = whole.sharding.shard_shape(whole.shape)
        self.data = Buffer(jax.core.ShapedArray(shape, whole.dtype), jax.sharding.SingleDeviceSharding(device))


def put(aval: Any, sharding: Any, parts: Sequence[Any], devices: Sequence[Any]) -> Buffer:
    """As `arrays.put`, of no values."""
    return Buffer(aval, sharding)


def own_values(values: Any) -> Any:
    """As `arrays.own_values`: nobody will look at them."""
    return values


def filled(shape: tuple[int, ...], dtype: torch.dtype, number: Any) -> Any:
    """As `arrays.filled`, in the memory of one number."""
    import numpy as np

    from torch_xla.ops.fallback import to_numpy

    return np.broadcast_to(to_numpy(torch.full((), number, dtype=dtype)), shape)


def _like(buffer: Buffer, shape: Sequence[int]) -> Buffer:
    import jax

    return Buffer(jax.core.ShapedArray(tuple(shape), buffer.dtype), buffer.sharding)


def copies(buffers: Sequence[Buffer]) -> list[Buffer]:
    """As `arrays.copies`."""
    return [Buffer(buffer.aval, buffer.sharding) for buffer in buffers]


def part(buffer: Buffer, start: int, shape: Sequence[int]) -> Buffer:
    """As `arrays.part`."""
    return _like(buffer, shape)


def member(stack: Buffer, index: int) -> Buffer:
    """As `arrays.member`."""
    return _like(stack, stack.shape[1:])


def pack(buffers: Sequence[Buffer]) -> Buffer:
    """As `arrays.pack`."""
    return _like(buffers[0], (sum(buffer.size for buffer in buffers),))


def stack(buffers: Sequence[Buffer]) -> Buffer:
    """As `arrays.stack`."""
    return _like(buffers[0], (len(buffers), *buffers[0].shape))


def unpack(buffer: Buffer, shapes: tuple[tuple[int, ...], ...]) -> list[Buffer]:
    """As `arrays.unpack`."""
    return [_like(buffer, shape) for shape in shapes]


def starter(loaded: Any, avals: Sequence[Any], shardings: Sequence[Any]) -> Callable[..., tuple[Buffer, ...]]:
    """As `arrays.starter`: its results are there at once, and nothing was computed."""

    def start(*inputs: Buffer) -> tuple[Buffer, ...]:
        if _events.sinks:
            device, _ = _held(shardings[0], avals[0].shape, avals[0].dtype.itemsize)
            taken = {id(buffer): buffer.bytes_on_device for buffer in inputs}
            _events.mark(RUN, loaded, max(_in_use.get(device, 0) - sum(taken.values()), 0))
        return tuple(map(Buffer, avals, shardings))

    return start


def compile(client: Any, module: Any, devices: Any, options: Any, host_callbacks: Any) -> Any:
    """As `arrays.compile`, by a client that has no devices."""
    if described.platform() == "cpu":  # they are here, and their client has no other way
        return client.compile_and_load(module, devices, options, host_callbacks=host_callbacks)
    return client.compile(module, devices, options)
