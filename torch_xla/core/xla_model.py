"""The classic API, imported as ``xm``: devices, barriers, optimizer steps, saving, random state, collectives."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from typing import IO, Any

import torch

from torch_xla import _api, _bindings, _config, _files, runtime
from torch_xla._api import index_of
from torch_xla._core.device import client, memory_stats
from torch_xla._core.execute import barrier as _barrier
from torch_xla._core.execute import export as _export
from torch_xla._core.execute import step_closures
from torch_xla._core.job import session
from torch_xla._deprecation import warn_once
from torch_xla._errors import message
from torch_xla.core._barriers import optimization_barrier_ as optimization_barrier_
from torch_xla.core._collectives import REDUCE_AND as REDUCE_AND
from torch_xla.core._collectives import REDUCE_MAX as REDUCE_MAX
from torch_xla.core._collectives import REDUCE_MIN as REDUCE_MIN
from torch_xla.core._collectives import REDUCE_MUL as REDUCE_MUL
from torch_xla.core._collectives import REDUCE_OR as REDUCE_OR
from torch_xla.core._collectives import REDUCE_SUM as REDUCE_SUM
from torch_xla.core._collectives import all_gather as all_gather
from torch_xla.core._collectives import all_gather_bucketized as all_gather_bucketized
from torch_xla.core._collectives import all_reduce as all_reduce
from torch_xla.core._collectives import all_reduce_bucketized_gradients as all_reduce_bucketized_gradients
from torch_xla.core._collectives import all_to_all as all_to_all
from torch_xla.core._collectives import broadcast_master_param as broadcast_master_param
from torch_xla.core._collectives import collective_broadcast as collective_broadcast
from torch_xla.core._collectives import collective_permute as collective_permute
from torch_xla.core._collectives import fetch_gradients as _fetch_gradients  # noqa: F401
from torch_xla.core._collectives import reduce_gradients as reduce_gradients
from torch_xla.core._collectives import reduce_scatter as reduce_scatter
from torch_xla.core._collectives import reduce_scatter_bucketized as reduce_scatter_bucketized
from torch_xla.core._library import XLA_LIB as XLA_LIB
from torch_xla.core._transfer import ToXlaTensorArena as ToXlaTensorArena
from torch_xla.core._transfer import _maybe_convert_to_cpu as _maybe_convert_to_cpu
from torch_xla.core._transfer import send_cpu_data_to_device as send_cpu_data_to_device

Device = str | torch.device

# A random state is a seed and a number of draws; both fit in one integer because the generator makes its keys from
# seed + draws * _STRIDE, modulo 2**64.
_STRIDE = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


# Devices.


def is_xla_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor lives on an XLA device."""
    return tensor.device.type == "xla"


def get_xla_supported_devices(max_devices: int | None = None) -> list[str]:
    """Names of the devices of this process.

    Args:
        max_devices: How many to return at most.

    Returns:
        A list such as ``["xla:0", "xla:1"]``.
    """
    count = client.device_count()
    return [f"xla:{index}" for index in range(min(count, max_devices) if max_devices else count)]


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """Returns an XLA device; the older name of `torch_xla.device`.

    Args:
        n: Index of the device, which also becomes the current one. The current one by default.
        devkind: Accepted for compatibility.
    """
    return _api.device(n)


def xla_real_devices(devices: list[Device] | None = None) -> list[str]:
    """Names of the hardware behind devices.

    Args:
        devices: The devices; all of this process by default.

    Returns:
        A list such as ``["CPU:0", "CPU:1"]``.
    """
    return [client.hardware(index_of(device)) for device in devices or get_xla_supported_devices()]


def xla_device_hw(device: Device) -> str:
    """Kind of hardware behind a device: ``"CPU"``, ``"CUDA"``, ``"TPU"`` or the name of a plugin."""
    return client.hardware(index_of(device)).split(":")[0]


def xla_device_kind(device: Device | None = None) -> str:
    """The vendor's name for the model of a device."""
    return client.jax_device(index_of(device)).device_kind


def xla_replication_devices(local_devices: list[Device] | None = None) -> list[str]:
    """Names of the hardware that takes part when work is replicated over the given devices."""
    return xla_real_devices(local_devices)


def set_replication(device: Device, devices: list[Device] | None) -> None:
    """Makes ``device`` the current one; with one process there is nothing to replicate.

    Args:
        device: The device of this process.
        devices: The devices of all processes.
    """
    if devices and str(device) not in [str(each) for each in devices]:
        raise ValueError(message("device", f"got {device}", expected=f"one of {[str(each) for each in devices]}"))
    _bindings.set_current_device(index_of(device))


def get_memory_info(device: Device | None = None) -> dict[str, int]:
    """Memory of a device.

    For CPU devices, which have no memory of their own, the figures are those of this process and its host.

    Args:
        device: The device; the current one by default.

    Returns:
        ``bytes_used``, ``bytes_limit`` and ``peak_bytes_used`` in bytes, and the older ``kb_free`` and ``kb_total``
        in KiB.
    """
    info = memory_stats.device_memory(index_of(device))
    free = max(info["bytes_limit"] - info["bytes_used"], 0)
    return info | {"kb_free": free // 1024, "kb_total": info["bytes_limit"] // 1024}


# Barriers.


def mark_step(wait: bool = False, reset_scope: bool = True) -> None:
    """Issues a barrier; the older name of `torch_xla.sync`."""
    _api.replaceable("sync")(wait, reset_scope)


def unlazy(tensors: list[torch.Tensor]) -> None:
    """Computes the tensors and waits until their values are there.

    Args:
        tensors: Tensors on XLA devices.
    """
    for position, tensor in enumerate(tensors):
        if not is_xla_tensor(tensor):
            raise ValueError(message("sync", f"tensor {position} is on {tensor.device}", expected="device xla"))
    _barrier.evaluate(list(tensors), wait=True)


def wait_device_ops(devices: list[Device] | None = None) -> None:
    """Waits for everything that was dispatched to devices.

    Args:
        devices: The devices; all of this process by default.
    """
    if devices:
        for device in devices:
            _barrier.wait(index_of(device))
    else:
        _barrier.wait(None)
    step_closures.drain()


def add_step_closure(closure: Callable[..., Any], args: tuple[Any, ...] = (), run_async: bool = False) -> None:
    """Queues a function to be called after the next barrier.

    Reading a tensor in the middle of a step evaluates it on its own; a closure reads it when the step has been
    dispatched as one graph.

    Args:
        closure: The function. Closures run in the order in which they were added.
        args: Its arguments, tensors among them.
        run_async: Whether to run it in another thread, while the next step is recorded. If it raises, a later barrier
            does.
    """
    step_closures.add(closure, args, run_async)


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: dict[str, Any] = {},  # noqa: B006 (only read)
    groups: list[list[int]] | None = None,
    pin_layout: bool = True,
) -> Any:
    """Averages gradients over all processes and runs ``optimizer.step``.

    Args:
        optimizer: The optimizer.
        barrier: Whether to issue a barrier afterwards. Not needed under `MpDeviceLoader`, which issues one per batch.
        optimizer_args: Keyword arguments of ``optimizer.step``.
        groups: See `all_reduce`.
        pin_layout: See `all_reduce`.

    Returns:
        What ``optimizer.step`` returned.
    """
    reduce_gradients(optimizer, groups=groups, pin_layout=pin_layout)
    loss = optimizer.step(**optimizer_args)
    if barrier:
        _api.replaceable("sync")()
    return loss


def get_stablehlo(tensors: list[torch.Tensor] | None = None) -> str:
    """StableHLO text of the graph that computes the tensors; of everything pending on the current device by default.

    Args:
        tensors: Tensors on an XLA device. Their values stay pending.
    """
    return _export.graph_text(list(tensors or []), "stablehlo")


def get_stablehlo_bytecode(tensors: list[torch.Tensor] | None = None) -> bytes:
    """StableHLO of `get_stablehlo` as portable bytecode."""
    return _export.graph_text(list(tensors or []), "stablehlo_bytecode")


# Random state.


def set_rng_state(seed: int, device: Device | None = None) -> None:
    """Sets the random state of a device.

    Args:
        seed: A seed, or what `get_rng_state` returned.
        device: The device; the current one by default.
    """
    _api.manual_seed(seed, device)


def get_rng_state(device: Device | None = None) -> int:
    """The random state of a device as one signed integer of 64 bits; right after seeding it is the seed.

    Args:
        device: The device; the current one by default.
    """
    seed, draws = _bindings.rng_state(index_of(device))
    state = (seed + draws * _STRIDE) & _MASK
    return state - (1 << 64) if state >> 63 else state


@contextlib.contextmanager
def fork_rng(device: Device | None = None, enabled: bool = True) -> Iterator[None]:
    """Gives a device its random state back at the end of a block.

    Args:
        device: The device; the current one by default.
        enabled: Whether to do anything.
    """
    if not enabled:
        yield
        return
    index = index_of(device)
    seed, draws = _bindings.rng_state(index)
    try:
        yield
    finally:
        _bindings.set_rng_state(index, seed, draws)


# Moving data.


def save(
    data: Any, file_or_path: str | os.PathLike[str] | IO[bytes], master_only: bool = True, global_master: bool = False
) -> None:
    """Saves data with ``torch.save`` after moving its tensors to the CPU, so that it loads anywhere.

    A file with this name stays as it is until the new one is whole. Processes do not wait for each other: the first may
    call this alone, and others must not load before a `rendezvous`.

    Args:
        data: Any nesting of containers.
        file_or_path: Where to write.
        master_only: Whether only the first process writes; otherwise each needs a path of its own.
        global_master: With ``master_only``, whether that is the first process of the job, not of each host.
    """
    writes = not master_only or is_master_ordinal(local=not global_master)
    cpu_data = _maybe_convert_to_cpu(data, convert=writes)
    if not writes:
        return
    if isinstance(file_or_path, str | os.PathLike):
        with _files.replacing(file_or_path) as path:
            torch.save(cpu_data, path)
    else:
        torch.save(cpu_data, file_or_path)


# Processes.


def get_local_ordinal() -> int:
    """Ordinal of this process on its host."""
    return runtime.local_ordinal()


def get_ordinal(defval: int = 0) -> int:
    """Ordinal of this process in the job; the older name of `torch_xla.runtime.global_ordinal`."""
    warn_once("torch_xla.core.xla_model.get_ordinal", "torch_xla.runtime.global_ordinal")
    return runtime.global_ordinal()


def xrt_world_size(defval: int = 1) -> int:
    """Number of processes of the job; the older name of `torch_xla.runtime.world_size`."""
    warn_once("torch_xla.core.xla_model.xrt_world_size", "torch_xla.runtime.world_size")
    return runtime.world_size()


def is_master_ordinal(local: bool = True) -> bool:
    """Whether this is the first process.

    Args:
        local: Whether of its host, or else of the whole job.
    """
    return (runtime.local_ordinal() if local else runtime.global_ordinal()) == 0


def master_print(*args: Any, fd: Any = None, local: bool = False, flush: bool = False) -> None:
    """Prints in the first process only.

    Args:
        *args: What to print.
        fd: File; standard output by default.
        local: Whether the first process of each host prints.
        flush: Whether to flush the file.
    """
    if is_master_ordinal(local=local):
        print(*args, file=sys.stdout if fd is None else fd, flush=flush)


def xla_rendezvous(payload: bytes = b"", ordinals: list[int] | None = None, tag: str | None = None) -> list[bytes]:
    """Waits until all processes are here, and exchanges bytes; issues a barrier.

    Args:
        payload: Bytes of this process.
        ordinals: The processes that take part: all of them.
        tag: Name of this meeting point, for messages.

    Returns:
        The payloads, by ordinal.
    """
    connection = session.connection()
    world = runtime.world_size()
    members = tuple(sorted(ordinals)) if ordinals else tuple(range(world))
    if not set(members) <= set(range(world)) or runtime.global_ordinal() not in members:
        expected = "[0] or None" if world == 1 else f"ordinals from 0 to {world - 1}, this process's among them"
        raise ValueError(message("rendezvous", f"ordinals={ordinals}", expected=expected))
    if not isinstance(payload, bytes):
        raise TypeError(message("rendezvous", f"`payload` must be bytes, not {type(payload)}"))
    _api.replaceable("sync")()
    return (
        [payload]
        if connection is None
        else connection.meet(tag or "rendezvous", members, f"rendezvous {tag!r}" if tag else "a rendezvous", payload)
    )


def rendezvous(tag: str, payload: bytes = b"", replicas: list[int] | None = None) -> list[bytes]:
    """Waits until all processes have reached the meeting point ``tag``; see `xla_rendezvous`.

    Args:
        tag: Name of the meeting point.
        payload: Bytes of this process.
        replicas: The processes that take part: all of them.
    """
    return xla_rendezvous(payload, replicas or None, tag=tag)


def do_on_ordinals(
    target: Callable[..., Any], data: Any = (), ordinals: list[int] | set[int] | tuple[int, ...] | int = (0,)
) -> Any:
    """Runs a function in some processes.

    Args:
        target: The function; it gets the items of ``data``, on the CPU.
        data: Its arguments.
        ordinals: The processes.

    Returns:
        What the function returned, or None where it did not run.
    """
    running = runtime.global_ordinal() in ([ordinals] if isinstance(ordinals, int) else ordinals)
    cpu_data = _maybe_convert_to_cpu(data, convert=running)
    result = target(*cpu_data) if running else None
    rendezvous("torch_xla.core.xla_model.do_on_ordinals")
    return result


def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[..., Any]) -> Any:
    """Gathers a value of each process on all of them, and reduces the list with a function.

    Args:
        tag: Name of the meeting point.
        data: Anything; tensors in it are moved to the CPU.
        reduce_fn: Takes the list of values, by ordinal.
    """
    cpu_data = _maybe_convert_to_cpu(data)
    payloads = rendezvous(tag, pickle.dumps(cpu_data))
    return reduce_fn([pickle.loads(payload) for payload in payloads])


class RateTracker:
    """Measures a rate, such as samples per second, smoothed over calls.

    Args:
        smooth_factor: Weight of the past, 0 to 1; by default ``RATE_TRACKER_SMOOTHING``, or 0.4.
    """

    def __init__(self, smooth_factor: float | None = None) -> None:
        self._smooth_factor = _config.RATE_TRACKER_SMOOTHING.get() if smooth_factor is None else smooth_factor
        self._start = self._last = time.monotonic()
        self._count = 0.0  # since the last call of `rate`
        self._total = 0.0
        self._rate: float | None = None

    def add(self, count: float) -> None:
        """Counts work that was done."""
        self._count += count
        self._total += count

    def rate(self) -> float:
        """Work per second since the last call, smoothed with earlier rates."""
        now = time.monotonic()
        seconds = now - self._last
        if seconds <= 0:
            return self._rate or 0.0
        rate = self._count / seconds
        if self._rate is not None:
            rate = (1 - self._smooth_factor) * rate + self._smooth_factor * self._rate
        self._last, self._count, self._rate = now, 0.0, rate
        return rate

    def global_rate(self) -> float:
        """Work per second since the tracker was made."""
        seconds = time.monotonic() - self._start
        return self._total / seconds if seconds > 0 else 0.0
