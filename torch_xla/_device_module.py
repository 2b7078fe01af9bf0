"""The module ``torch.xla``: what PyTorch and libraries ask of a device type in general.

Work is dispatched in order, on one stream per device; streams and events exist so that generic code runs.
"""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from torch_xla import _bindings
from torch_xla._core.device import client
from torch_xla._core.device.memory_stats import device_memory
from torch_xla._core.execute import barrier as _barrier
from torch_xla._graph import Graph as Graph
from torch_xla._graph import is_current_stream_capturing as is_current_stream_capturing

_WORD = 1 << 64

_forked_from_client = False


def _note_fork() -> None:
    global _forked_from_client
    _forked_from_client = _forked_from_client or client.client_started()


os.register_at_fork(after_in_child=_note_fork)


def _index(device: Any = None) -> int:
    index = device if isinstance(device, int) or device is None else torch.device(device).index
    if index is None:
        return _bindings.current_device()
    return _bindings.known_index(index)


# Devices.


def is_available() -> bool:
    """Whether there is an XLA device; the CPU always is one."""
    return client.device_count() > 0


def is_initialized() -> bool:
    """Whether a client was started."""
    return client.client_started()


def _is_in_bad_fork() -> bool:
    """Whether this process was forked from one with a running client, which does not work here."""
    return _forked_from_client


def device_count() -> int:
    """Number of devices of this process."""
    return client.device_count()


def current_device() -> int:
    """Index of the current device."""
    return _bindings.current_device()


def set_device(device: Any) -> None:
    """Makes a device, or the device of an index, the current one."""
    client.publish_count()  # a script may have set how many there are after the import
    _bindings.set_current_device(_index(device))


class device:
    """Context in which another device is the current one.

    Args:
        device: A device or its index; None or a negative index changes nothing.
    """

    def __init__(self, device: Any) -> None:
        self.idx = -1 if device is None else _index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _bindings.current_device()
        if self.idx >= 0:
            _bindings.set_current_device(self.idx)

    def __exit__(self, *exc: object) -> None:
        _bindings.set_current_device(self.prev_idx)


class device_of(device):
    """Context in which a tensor's device is the current one; any other object changes nothing."""

    def __init__(self, obj: Any) -> None:
        on_xla = isinstance(obj, torch.Tensor) and obj.device.type == "xla"
        super().__init__(obj.device if on_xla else None)


def get_device_name(device: Any = None) -> str:
    """Name of the hardware, such as ``"CPU:0"``."""
    return client.hardware(_index(device))


def synchronize(device: Any = None) -> None:
    """Dispatches what is pending on a device and waits for it."""
    index = _index(device)
    _barrier.sync(index, True)
    _barrier.wait(index)


# Random state.


def manual_seed(seed: int) -> None:
    """Seeds the current device."""
    _bindings.set_rng_state(_bindings.current_device(), int(seed) % _WORD, 0)


def manual_seed_all(seed: int) -> None:
    """Seeds all devices."""
    for index in range(client.device_count()):
        _bindings.set_rng_state(index, int(seed) % _WORD, 0)


def seed() -> None:
    """Seeds the current device with a number from the system."""
    manual_seed(int.from_bytes(os.urandom(8), "little"))


def seed_all() -> None:
    """Seeds all devices with one number from the system."""
    manual_seed_all(int.from_bytes(os.urandom(8), "little"))


def initial_seed() -> int:
    """The seed of the current device."""
    return _bindings.rng_state(_bindings.current_device())[0]


def get_rng_state(device: Any = "xla") -> torch.Tensor:
    """Random state of a device: seed and number of draws, 16 bytes in a uint8 CPU tensor."""
    seed, draws = _bindings.rng_state(_index(device))
    raw = seed.to_bytes(8, "little") + draws.to_bytes(8, "little")
    return torch.tensor(list(raw), dtype=torch.uint8)


def set_rng_state(new_state: torch.Tensor, device: Any = "xla") -> None:
    """Sets a device's random state to one from `get_rng_state`."""
    raw = bytes(new_state.tolist())
    if len(raw) != 16:
        raise ValueError(f"[random] got a state of {len(raw)} bytes, expected the 16 of torch.xla.get_rng_state()")
    _bindings.set_rng_state(_index(device), int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little"))


def get_rng_state_all() -> list[torch.Tensor]:
    """Random states of all devices."""
    return [get_rng_state(index) for index in range(client.device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    """Sets the random states of all devices."""
    for index, state in enumerate(new_states):
        set_rng_state(state, index)


# Mixed precision and memory.


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Types that ``torch.autocast("xla")`` may cast to."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Whether `torch.bfloat16` works; XLA supports it on every backend."""
    return True


def _memory(device: Any, key: str) -> int:
    return device_memory(_index(device))[key]


def memory_allocated(device: Any = None) -> int:
    """Bytes in use on a device."""
    return _memory(device, "bytes_used")


def max_memory_allocated(device: Any = None) -> int:
    """Most bytes that were in use on a device."""
    return _memory(device, "peak_bytes_used")


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free and total bytes of a device."""
    total = _memory(device, "bytes_limit")
    return max(total - _memory(device, "bytes_used"), 0), total


class DeviceProperties(NamedTuple):
    """What is known of a device."""

    name: str
    total_memory: int


def get_device_properties(device: Any = None) -> DeviceProperties:
    """Name and bytes of a device."""
    return DeviceProperties(get_device_name(device), _memory(device, "bytes_limit"))


def memory_stats(device: Any = None) -> dict[str, int]:
    """Bytes in use on a device, and the most that were, under the names that PyTorch has for other devices."""
    now, peak = memory_allocated(device), max_memory_allocated(device)
    kinds = ("allocated", "active", "reserved")
    return {f"{kind}_bytes.all.{when}": size for kind in kinds for when, size in (("current", now), ("peak", peak))}


def reset_peak_memory_stats(device: Any = None) -> None:
    """Does nothing: the runtime's peak is that of the process."""


def empty_cache() -> None:
    """Does nothing: the runtime keeps no cache of freed memory that could be given back."""


# Streams.


class Stream:
    """The one stream of a device, in which work runs in the order of its dispatch."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device_index = _index(device)
        self.device = torch.device("xla", self.device_index)

    def synchronize(self) -> None:
        """Waits for the device."""
        synchronize(self.device_index)

    def query(self) -> bool:
        """Whether the device has computed all that was recorded; starts what is pending, and does not wait."""
        return _barrier.query(self.device_index)

    def wait_stream(self, stream: Stream) -> None:
        """Does nothing: order is kept anyway."""

    def wait_event(self, event: Event) -> None:
        """Does nothing: order is kept anyway."""

    def record_event(self, event: Event | None = None) -> Event:
        """Records an event on this stream."""
        event = event or Event()
        event.record(self)
        return event

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.device_index == self.device_index

    def __hash__(self) -> int:
        return hash(("xla stream", self.device_index))


class Event:
    """A point in a device's work; with timing, recording it computes what is pending.

    Without, waiting for it does: libraries record many in a step, which stays one program.
    """

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._stream: Stream | None = None
        self._time: float | None = None
        self._timed = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        """Marks this point of the stream; with timing, waits until the device has reached it."""
        self._stream = stream or current_stream()
        if self._timed:
            self._stream.synchronize()
            self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Does nothing: order is kept anyway."""

    def query(self) -> bool:
        """Whether the device has passed this point; starts what is pending, and does not wait."""
        return self._stream is None or self._stream.query()

    def synchronize(self) -> None:
        """Waits until the device has passed this point."""
        if self._stream is not None:
            self._stream.synchronize()

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds between two recorded events that were made with ``enable_timing=True``."""
        if self._time is None or end_event._time is None or not (self._timed and end_event._timed):
            raise RuntimeError(
                "[stream] got an event without a time, expected both made with enable_timing=True and recorded"
            )
        return (end_event._time - self._time) * 1e3


def current_stream(device: Any = None) -> Stream:
    """The stream of a device."""
    return Stream(device)


default_stream = current_stream


def set_stream(stream: Stream) -> None:
    """Makes the stream's device the current one."""
    set_device(stream.device_index)


@contextmanager
def stream(stream: Stream | None) -> Iterator[Stream | None]:
    """Context in which the stream's device is the current one."""
    with device(None if stream is None else stream.device_index):
        yield stream


def __getattr__(name: str) -> Any:
    # Checkpointing asks here whether there is random state worth saving.
    if name == "_initialized":
        return client.client_started()
    if name == "amp":
        return importlib.import_module("torch_xla.amp")
    raise AttributeError(f"module 'torch.xla' has no attribute {name!r}")
