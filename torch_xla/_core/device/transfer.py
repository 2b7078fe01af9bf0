"""Copies: values from the host to a device, back, and on a device; and waits for what was started."""

from __future__ import annotations

import functools
import itertools
import math
import mmap
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torch_xla import _events, _metrics
from torch_xla._core.device import client, failures, memory_stats, placement

if TYPE_CHECKING:
    import jax

_MOST_DIMENSIONS = 64
# Sees that the processes of a job gather the same buffer, which it is given, and gives what takes the result; and that
# they ran the same programs until now.
_gather: Callable[[Any], Callable[[Any], None]] | None = None
_settle: Callable[[], None] | None = None
_puts = itertools.count(1)


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
    """A CPU tensor's values as a NumPy array that nobody else has.

    On CPU the client keeps aligned host memory instead of copying it: PyTorch's is aligned, NumPy's mostly not.
    """
    from torch_xla.ops.fallback import to_numpy

    return to_numpy(tensor.detach().clone(memory_format=torch.contiguous_format))


def put(array: Any, index: int, number: int = 0) -> jax.Array:
    """Moves a NumPy array, which must not be changed afterwards, to a place on a device, by its placement number."""
    import jax

    from torch_xla import _jax_internals

    place = placement.of(index)
    _metrics.add_sample("OutboundData", array.nbytes, "bytes")
    with _events.timed("TransferToDeviceTime"):
        # What `jax.device_put` comes to, in an eighth of its time: a learning rate that changes is put at each step.
        aval = jax.core.ShapedArray(array.shape, array.dtype)
        parts = [array[where] for where in place.parts(number, array.shape)] if number else [array] * len(place.local)
        buffer = _jax_internals.batched_device_put(
            aval, place.at(number, array.shape), parts, list(place.local), enable_x64=True
        )
        return _with_origin(buffer) if number else buffer


def put_parts(parts: Sequence[Any], shape: Sequence[int], index: int, number: int) -> jax.Array:
    """Moves NumPy arrays, one for each local device in their order, to a device as parts of one buffer of a shape.

    They must not be changed afterwards; the number is that of the placement.
    """
    import jax

    from torch_xla import _jax_internals

    place = placement.of(index)
    _metrics.add_sample("OutboundData", sum(part.nbytes for part in parts), "bytes")
    with _events.timed("TransferToDeviceTime"):
        aval = jax.core.ShapedArray(tuple(shape), parts[0].dtype)
        return _with_origin(
            _jax_internals.batched_device_put(
                aval, place.at(number, shape), list(parts), list(place.local), enable_x64=True
            )
        )


def _with_origin(buffer: jax.Array) -> jax.Array:
    """A buffer that, where processes have parts of it, says which it is of those that were put there: all put alike."""
    if client.devices_of_job() and not is_readable(buffer):
        buffer.origin = f"number {next(_puts)} of those put there"  # type: ignore[attr-defined]  # an attribute of our own
    return buffer


def fill(
    shape: tuple[int, ...], dtype: torch.dtype, number: Any, index: int, line: str | None = None, where: int = 0
) -> jax.Array:
    """A device buffer that holds one number everywhere, at a placement number on its device; `line` is the user's.

    Raises torch.OutOfMemoryError.
    """
    with _MemoryScope(shape, dtype, index, line):
        return put(_host_fill(shape, dtype, number), index, where)


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


_UNTOUCHED = 1 << 20  # bytes from which zeros are pages of their own


def _host_fill(shape: tuple[int, ...], dtype: torch.dtype, number: Any) -> Any:
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


def move(location: tuple[Any, int], shape: Sequence[int], dtype: torch.dtype, index: int, number: int) -> jax.Array:
    """A new device buffer with the values at a location, as `download` has it, in another place; compiles nothing."""
    return upload(download(location, shape, dtype), index, number)


def download(location: tuple[Any, int], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A new CPU tensor with values of the device; waits until they are computed.

    A location is the buffer and the index of the first element in it, -1 where it holds nothing else.
    """
    import numpy as np

    from torch_xla.ops.fallback import from_numpy

    buffer, start = location
    if start >= 0 and buffer.ndim > 1 and not client.is_own_cpu():
        buffer, start = copy(location, shape), -1  # not all of what travels with it
    wait_start = time.perf_counter()
    finish_to_read(buffer)
    _metrics.waited(wait_start)
    with _events.timed("TransferFromDeviceTime"):
        values = np.asarray(_gathered(buffer))
        if values.ndim > len(shape) and start < 0:  # all parts of manual sharding, of which this process sees the first
            values = values[0]
        _metrics.add_sample("InboundData", values.nbytes, "bytes")
        if start >= 0:
            values = values.reshape(-1)[start : start + math.prod(shape)].reshape(shape)
        return from_numpy(values, dtype)


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
    finish(buffer)
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
    finish(results[0])  # on all devices: the others need what this process has of it
    return results[0]


@functools.lru_cache(maxsize=256)
def _replicate(split: Any) -> Any:
    import jax

    replicated = jax.sharding.NamedSharding(split.mesh, jax.sharding.PartitionSpec())
    return jax.jit(lambda x: x, out_shardings=replicated)


def finish(started: Any, index: int | None = None) -> None:
    """Waits for a buffer or a token, of a device that a buffer knows by itself.

    Raises ExecutionError where the program that makes it failed, which is a torch.OutOfMemoryError too where it did not
    fit, and RuntimeError where the buffer was deleted.
    """
    try:
        started.block_until_ready()
        return
    except Exception as error:
        if index is None and started.is_deleted():
            text = f"[transfer] a buffer, {started.aval}, is gone: something outside torch_xla deleted it ({error})"
            raise RuntimeError(text) from None
        failure = failures.late(error, placement.index_of(started) if index is None else index)
    raise failure


def copy(location: tuple[Any, int], shape: Sequence[int]) -> jax.Array:
    """A new device buffer with the values at a location, as `download` reads them."""
    buffer, start = location
    if start < 0:
        return copies([buffer])[0]
    if buffer.ndim > 1:
        return member(buffer, start // math.prod(shape))
    with client.x64():
        return placement.with_others(placement.own_part(buffer)[start : start + math.prod(shape)].reshape(shape))


def member(stack: jax.Array, index: int) -> jax.Array:
    """One of an array's members as a device buffer of its own."""
    with client.x64():
        return placement.with_others(_member()(placement.own_part(stack), index))


@functools.cache
def _member() -> Any:
    import jax

    return jax.jit(lambda stack, index: jax.lax.dynamic_index_in_dim(stack, index, keepdims=False))


def copies(buffers: Sequence[Any]) -> list[Any]:
    """A copy of each device buffer, on its device; compiles nothing."""
    import jax

    if client.spmd() and client.devices_of_job():
        return [_copied_parts(buffer) for buffer in buffers]
    with client.x64():
        copied = jax.device_put([placement.own_part(buffer) for buffer in buffers], may_alias=False)
    return [placement.with_others(part) for part in copied]


def _copied_parts(buffer: Any) -> Any:
    import jax

    from torch_xla import _jax_internals

    with client.x64():
        parts = jax.device_put([shard.data for shard in buffer.addressable_shards], may_alias=False)
    copied_array = _jax_internals.ArrayImpl(buffer.aval, buffer.sharding, parts, committed=True, _skip_checks=True)
    copied_array.origin = origin_of(buffer)
    return copied_array
