"""Copies: values from the host to a device, back, and on a device; and waits for what was started."""

from __future__ import annotations

import functools
import itertools
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from torch_xla import _events, _metrics
from torch_xla._core.device import buffers, client, failures, memory_stats, placement

if TYPE_CHECKING:
    import jax

_MOST_DIMENSIONS = 64
# Sees that the processes of a job gather the same buffer, which it is given, and gives what takes the result; and that
# they ran the same programs until now.
_gather: Callable[[Any], Callable[[Any], None]] | None = None
_settle: Callable[[], None] | None = None
_puts = itertools.count(1)
_views = threading.RLock()  # on a buffer's memory, which a plugin of a CPU counts without a lock of its own


def upload(tensor: torch.Tensor, index: int, number: int = 0, immutable: bool = False) -> jax.Array:
    """Copies a CPU tensor to a device, with a placement number; returns the buffer.

    The tensor is copied on the host first, unless it is `immutable`: nobody writes to its memory any more. Raises
    TypeError where XLA has no such dtype, RuntimeError where it has more dimensions than NumPy's arrays can have, and
    torch.OutOfMemoryError.
    """
    from torch_xla.ops.fallback import to_numpy

    if tensor.dim() > _MOST_DIMENSIONS:
        raise RuntimeError(
            f"[transfer] got a tensor of {tensor.dim()} dimensions, "
            f"only tensors with up to {_MOST_DIMENSIONS} dims are supported; reshape it"
        )
    with _events.timed("TensorToData"), _MemoryScope(tensor.shape, tensor.dtype, index):
        return put(to_numpy(tensor) if immutable else own_values(tensor), index, number)


def own_values(tensor: torch.Tensor) -> Any:
    """A CPU tensor's values as a NumPy array that nobody else writes to."""
    from torch_xla.ops.fallback import to_numpy

    return to_numpy(buffers.kind().own_values(tensor.detach()))


def put(array: Any, index: int, number: int = 0, origin: str | None = None) -> jax.Array:
    """Moves a NumPy array, which nobody changes any more, to a device, by its placement number; `origin` names it."""
    import jax

    place = placement.of(index)
    _metrics.add_sample("OutboundData", array.nbytes, "bytes")
    with _events.timed("TransferToDeviceTime"):
        aval = jax.core.ShapedArray(array.shape, array.dtype)
        parts = [array[where] for where in place.parts(number, array.shape)] if number else [array] * len(place.local)
        buffer = buffers.kind().put(aval, place.at(number, array.shape), parts, list(place.local))
        return _with_origin(buffer, origin) if number else buffer


def put_parts(parts: Sequence[Any], shape: Sequence[int], index: int, number: int) -> jax.Array:
    """Moves NumPy arrays, one for each local device in their order, to a device as parts of one buffer of a shape.

    They must not be changed afterwards; the number is that of the placement.
    """
    import jax

    place = placement.of(index)
    _metrics.add_sample("OutboundData", sum(part.nbytes for part in parts), "bytes")
    with _events.timed("TransferToDeviceTime"):
        aval = jax.core.ShapedArray(tuple(shape), parts[0].dtype)
        return _with_origin(buffers.kind().put(aval, place.at(number, shape), list(parts), list(place.local)))


def _with_origin(buffer: jax.Array, origin: str | None = None) -> jax.Array:
    """A buffer that, where processes have parts of it, says which it is of those that were put there: all put alike."""
    if client.devices_of_job() and not is_readable(buffer):
        buffer.origin = origin or f"number {next(_puts)} of those put there"  # type: ignore[attr-defined]  # an attribute of our own
    return buffer


def fill(
    shape: tuple[int, ...], dtype: torch.dtype, number: Any, index: int, line: str | None = None, where: int = 0
) -> jax.Array:
    """A device buffer that holds one number everywhere, at a placement number on its device; `line` is the user's.

    Raises torch.OutOfMemoryError.
    """
    with _MemoryScope(shape, dtype, index, line):
        return put(buffers.kind().filled(shape, dtype, number), index, where, f"{number} everywhere")


class _MemoryScope:
    """A scope that moves values of a tensor to a device; what there is no room for is said as PyTorch says it.

    From Python 3.12 on a generator's scope that raises another error is in a cycle with the callers and their tensors.
    """

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, index: int, line: str | None = None) -> None:
        self._about = shape, dtype, index, line

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and memory_stats.ran_out(error):
            raise memory_stats.explain_host(error, *self._about) from error


def download(location: tuple[Any, int], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A new CPU tensor with values of the device; waits until they are computed.

    A location is the buffer and the index of the first element in it, -1 where it holds nothing else.
    """
    buffer, start = location
    if start >= 0 and buffer.ndim > 1 and not client.is_own_cpu():
        buffer, start = copy(location, shape), -1  # not all of what travels with it
    wait_start = time.perf_counter()
    finish_to_read(buffer)
    _metrics.waited(wait_start)
    with _events.timed("TransferFromDeviceTime"):
        return read((_gathered(buffer), start), shape, dtype)


def read(location: tuple[Any, int], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """As `download`, of a buffer that is computed and here."""
    import numpy as np

    from torch_xla.ops.fallback import from_numpy

    buffer, start = location
    with viewing(buffer):
        values = np.asarray(buffer)
        if values.ndim > len(shape) and start < 0:  # all parts of manual sharding, of which this process sees the first
            values = values[0]
        _metrics.add_sample("InboundData", values.nbytes, "bytes")
        if start >= 0:
            values = values.reshape(-1)[start : start + math.prod(shape)].reshape(shape)
        copied = from_numpy(values, dtype)
        del values  # within the scope
    return copied


def viewing(buffer: Any) -> AbstractContextManager[Any]:
    """A scope in which this thread makes a NumPy array of a buffer, perhaps a view; that must not outlive it."""
    if client.is_own_cpu():
        return nullcontext()
    buffer.copy_to_host_async()  # where it travels, it does so beside others
    return _views


def is_readable(buffer: Any) -> bool:
    """Whether this process has all values of a buffer."""
    return bool(buffer.is_fully_addressable or buffer.is_fully_replicated)


def origin_of(buffer: Any) -> str:
    """An identity of a buffer with shards in several processes, equal in all of them."""
    return getattr(buffer, "origin", "of unknown origin")


def set_agreement(gather: Callable[[Any], Callable[[Any], None]], settle: Callable[[], None]) -> None:
    """Says who sees that the processes of a job read the same; called once, at import."""
    global _gather, _settle
    _gather, _settle = gather, settle


def finish_to_read(buffer: Any) -> None:
    """Waits for a buffer whose values go to the host, which the others may have had a part in."""
    failures.finish(buffer)
    if _settle is not None and client.devices_of_job():
        _settle()


def _gathered(buffer: Any) -> Any:
    """All-gathers an array of which other processes have parts, so that this process can read it."""
    if is_readable(buffer):
        return buffer
    assert _gather is not None
    report_results, results = _gather(buffer), None
    try:
        results = (_replicate(buffer.sharding)(buffer),)
    finally:
        report_results(results)
    failures.finish(results[0])  # on all devices: the others need what this process has of it
    return results[0]


@functools.lru_cache(maxsize=256)
def _replicate(split: Any) -> Any:
    import jax

    replicated = jax.sharding.NamedSharding(split.mesh, jax.sharding.PartitionSpec())
    return jax.jit(lambda x: x, out_shardings=replicated)


def copy(location: tuple[Any, int], shape: Sequence[int]) -> jax.Array:
    """A new device buffer with the values at a location, as `download` reads them."""
    buffer, start = location
    if start < 0:
        return copies([buffer])[0]
    if buffer.ndim > 1:
        return buffers.kind().member(buffer, start // math.prod(shape))
    return buffers.kind().part(buffer, start, shape)


def copies(of: Sequence[Any]) -> list[Any]:
    """A copy of each device buffer, on its device; compiles nothing."""
    return list(buffers.kind().copies(of))
