"""Loaders that read batches and copy them to devices in background threads, while the devices work on earlier ones.

Per loader one thread reads the host's batches in order and deals them out to the devices; per device further threads
copy. A batch takes its place in the device's queue before it is copied, so the order is kept with several copying
threads, and never more than the queue's size are on the device ahead of the loop. A failure takes such a place too, and
is raised in the loop when its turn comes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from torch_xla import _api, _events
from torch_xla._core.device import background
from torch_xla._core.report import debug_level
from torch_xla._errors import message
from torch_xla.core import xla_model as xm
from torch_xla.distributed._buckets import Buckets as Buckets
from torch_xla.distributed._buckets import Padded, Wrapper, buckets_of
from torch_xla.utils.keyd_queue import Queue

_END = object()
# How long `close` waits for a thread that is inside the user's data set.
_JOIN_SECONDS = 5.0


class _DeviceLane:
    """Queues of one device: host batches to copy, and places in order."""

    def __init__(self, device: torch.device, host_size: int, device_size: int) -> None:
        self.device = device
        self.host = Queue(host_size)  # of batches, each with None, or None with what reading it raised
        self.places = Queue(device_size)  # of futures of batches on the device
        self._taking = threading.Lock()

    def next_to_copy(self) -> tuple[Future[Any], Any, BaseException | None] | None:
        """The next host batch with its place, taken together so that places are in the order of batches."""
        with self._taking:
            item = self.host.get()
            if item is None:
                self.places.close_write()
                return None
            place: Future[Any] = Future()
            return (place, *item) if self.places.put(place) else None

    def close(self) -> None:
        self.host.close()
        self.places.close()


class _Work:
    """The state that the threads share. It has no reference to the loader, which may be collected while they run."""

    def __init__(self, lanes: list[_DeviceLane], copying_threads: int, sharding: Any) -> None:
        self.lanes = lanes
        self.closed = threading.Event()
        self.sharding = sharding
        self.copying_threads = copying_threads
        self.threads: list[threading.Thread] = []

    def start(self, batches: Iterator[Any]) -> None:
        self._thread("read", self._read, batches)
        for lane in self.lanes:
            for _ in range(self.copying_threads):
                self._thread(f"copy-{lane.device}", self._copy, lane)

    def _thread(self, name: str, target: Any, argument: Any) -> None:
        self.threads.append(background.start(f"loader-{name}", target, argument, stop=self.close))

    def close(self) -> None:
        self.closed.set()
        for lane in self.lanes:
            lane.close()

    def join(self, seconds: float) -> None:
        for thread in self.threads:
            if thread is not threading.current_thread():
                thread.join(seconds)

    def _read(self, batches: Iterator[Any]) -> None:
        lane_number = 0
        try:
            for batch in batches:
                if self.closed.is_set() or not self.lanes[lane_number].host.put((batch, None)):
                    return
                lane_number = (lane_number + 1) % len(self.lanes)
        except BaseException as error:
            for lane in self.lanes:
                lane.host.put((None, error))
        finally:
            for lane in self.lanes:
                lane.host.close_write()

    def _copy(self, lane: _DeviceLane) -> None:
        while (item := lane.next_to_copy()) is not None:
            place, batch, failure = item
            try:
                if failure is not None:
                    raise failure
                place.set_result(_send(batch, lane.device, self.sharding))
            except BaseException as error:
                place.set_exception(error)
            del item, place, batch, failure  # the loop below may wait for long


def _send(batch: Any, device: torch.device, sharding: Any) -> Any:
    if isinstance(sharding, dict):
        if not isinstance(batch, dict):
            raise ValueError(message("loader", f"got a batch of {type(batch).__name__}", expected="a dict"))
        if missing := batch.keys() - sharding.keys():
            raise KeyError(message("loader", f"no entry in input_sharding for {sorted(missing)}"))
        return {key: _send(value, device, sharding[key]) for key, value in batch.items()}
    if isinstance(batch, torch.Tensor):
        return xm.send_cpu_data_to_device([batch], device, sharding)[0]
    return xm.send_cpu_data_to_device(batch, device, sharding)


def _with_index(device: Any) -> torch.device:
    """Names the current device by its index: another thread may have another current one."""
    torch_device = torch.device(device)
    return _api.device() if torch_device.type == "xla" and torch_device.index is None else torch_device


def _tells_where_it_is(loader: Any) -> bool:
    """Whether a loader tells the loop, as accelerate's do, that the batch that it has is the last one.

    Read ahead of the loop, it would tell too early: accelerate then reduces gradients in each step, and leaves samples
    that pad the last batch in what it gathers.
    """
    return hasattr(loader, "end_of_dataloader")


class PerDeviceLoader:
    """Iterator over the batches of one device; made by `ParallelLoader.per_device_loader`."""

    def __init__(self, loader: ParallelLoader, device: torch.device) -> None:
        self._loader = loader
        self._device = device
        self._sync_batch_count = loader.batches_per_execution - 1
        self._batches_yielded = 0

    def __iter__(self) -> PerDeviceLoader:
        return self

    def __next__(self) -> Any:
        return self.next()

    def __len__(self) -> int:
        return self._loader._samples_of(self._device)

    def next(self) -> Any:
        """Issues a barrier where one is due, and gives the next batch.

        Raises:
            StopIteration: no batches are left; a last barrier was issued.
        """
        due = self._batches_yielded >= self._sync_batch_count
        self._batches_yielded = 0 if due else self._batches_yielded + 1
        if due:
            _api.barrier(debug_level.LOADER)
        item = self._loader.next_item(self._device)
        if item is _END:
            if not due:
                _api.barrier(debug_level.LOADER)
            raise StopIteration
        return item

    def close(self) -> None:
        """Stops the background threads."""
        self._loader.close()


class ParallelLoader:
    """Reads batches in the background and deals them out to devices in turn.

    Args:
        cpu_loader: A `torch.utils.data.DataLoader`, or anything that yields batches: nested containers of CPU tensors.
        devices: Where the batches go: batch ``i`` to ``devices[i % len(devices)]``.
        batchdim: Accepted for compatibility.
        batches_per_execution: Number of batches between two barriers.
        loader_prefetch_size: Number of host batches read ahead, for each device.
        device_prefetch_size: Number of batches on a device ahead of the loop.
        host_to_device_transfer_threads: Number of copying threads for each device.
        input_sharding: A `torch_xla.distributed.spmd.ShardingSpec`, or one for each key of batches that are dicts.
    """

    def __init__(
        self,
        cpu_loader: Any,
        devices: Iterable[Any],
        batchdim: int = 0,
        batches_per_execution: int = 1,
        loader_prefetch_size: int = 16,
        device_prefetch_size: int = 8,
        host_to_device_transfer_threads: int = 1,
        input_sharding: Any = None,
    ) -> None:
        for name, value in (
            ("batches_per_execution", batches_per_execution),
            ("loader_prefetch_size", loader_prefetch_size),
            ("device_prefetch_size", device_prefetch_size),
            ("host_to_device_transfer_threads", host_to_device_transfer_threads),
        ):
            if value < 1:
                raise ValueError(message("loader", f"{name}={value}", expected="1 or more"))
        specs = input_sharding.values() if isinstance(input_sharding, dict) else [input_sharding]
        if not all(spec is None or hasattr(spec, "can_apply") for spec in specs):
            raise TypeError(message("loader", f"input_sharding={input_sharding}", expected="a ShardingSpec or a dict"))
        self._cpu_loader = cpu_loader
        self._devices = [_with_index(device) for device in devices]
        self._batchdim = batchdim
        self._batches_per_execution = batches_per_execution
        self._lanes = {
            device: _DeviceLane(device, loader_prefetch_size, device_prefetch_size) for device in self._devices
        }
        self._work = _Work(list(self._lanes.values()), host_to_device_transfer_threads, input_sharding)
        self._in_step: Iterator[Any] | None = None
        # Made here and not in a thread: a DataLoader forks its workers and draws its seed in this call.
        batches = iter(cpu_loader)
        if len(self._devices) == 1 and _tells_where_it_is(cpu_loader):
            self._in_step = batches
            return
        # A loop that ends early drops the loader; that alone must end the threads.
        weakref.finalize(self, self._work.close)
        self._work.start(batches)

    @property
    def batches_per_execution(self) -> int:
        """Number of batches between two barriers."""
        return self._batches_per_execution

    def per_device_loader(self, device: Any) -> PerDeviceLoader:
        """The iterator over the batches of a device.

        Args:
            device: One of the loader's devices.
        """
        torch_device = _with_index(device)
        if torch_device not in self._lanes:
            raise ValueError(message("loader", f"got device {torch_device}", expected=f"one of {list(self._lanes)}"))
        return PerDeviceLoader(self, torch_device)

    def per_device_samples(self) -> int:
        """Number of batches that every device gets."""
        return len(self._cpu_loader) // len(self._devices)

    def next_item(self, device: torch.device) -> Any:
        """The next batch of a device, waiting for it; re-raises what failed in the background."""
        if self._in_step is not None:
            with _events.span("loader"):
                batch = next(self._in_step, _END)
                return batch if batch is _END else _send(batch, device, self._work.sharding)
        try:
            with _events.span("loader"):
                place: Future[Any] | None = self._lanes[device].places.get()
                return _END if place is None else place.result()
        except BaseException:
            self._work.close()
            raise

    def close(self) -> None:
        """Stops the background threads and waits for them."""
        if self._in_step is not None:
            self._in_step = iter(())
        self._work.close()
        self._work.join(_JOIN_SECONDS)

    def _samples_of(self, device: torch.device) -> int:
        rest = len(self._cpu_loader) % len(self._devices)
        return self.per_device_samples() + (self._devices.index(device) < rest)


class MpDeviceLoader(Wrapper):
    """Wraps a loader so that its batches arrive on a device, with a barrier per batch.

    Each ``iter()`` starts background threads of its own; they end with the loop, also when it is left early. A loader
    that tells the loop where it is, as accelerate's do, is read batch by batch, while the device runs the step before.
    What the wrapped loader has besides (``batch_size``, ``sampler``, …) is found on this object too.

    Args:
        loader: A `torch.utils.data.DataLoader`, or anything that yields nested containers of CPU tensors.
        device: Where the batches go.
        pad_to: Lengths that sequences are padded to, such as ``[64, 128, 256]``, so that there are as many programs;
            or `Buckets`, which say in which dimension, with what, and whether there shall be a mask.
        **kwargs: Arguments of `ParallelLoader`.

    Example::

        for images, labels in MpDeviceLoader(train_loader, torch_xla.device()):
            ...
    """

    def __init__(self, loader: Any, device: Any, *, pad_to: Buckets | Sequence[int] | int | None = None, **kwargs: Any):
        self._loader = loader
        self._device = device
        self._buckets = None if pad_to is None else buckets_of(pad_to)
        self._parallel_loader_kwargs = kwargs
        self._dataset: Any = None
        self._current: weakref.ref[ParallelLoader] | None = None

    def __iter__(self) -> Iterator[Any]:
        batches = self._loader if self._buckets is None else Padded(self._loader, self._buckets)
        parallel = ParallelLoader(batches, [self._device], **self._parallel_loader_kwargs)
        self._current = weakref.ref(parallel)
        return parallel.per_device_loader(self._device)

    @property
    def _parallel_loader(self) -> ParallelLoader | None:
        """The loader of the iteration that started last, while it runs."""
        return self._current() if self._current is not None else None

    @property
    def dataset(self) -> Any:
        """The data set of the wrapped loader, or what a caller says it is."""
        return self._dataset if self._dataset is not None else self._loader.dataset

    @dataset.setter
    def dataset(self, value: Any) -> None:
        try:
            self._loader.dataset = value
        except ValueError:  # a loader of PyTorch keeps its own
            self._dataset = value

    def close(self) -> None:
        """Stops the iteration that started last."""
        parallel = self._parallel_loader
        if parallel is not None:
            parallel.close()
