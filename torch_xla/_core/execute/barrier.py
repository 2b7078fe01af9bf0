"""Runs barriers and reads, one at a time; `pipeline.py` runs their stages, `plan.py` says which graphs run and how."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import torch

from torch_xla import _bindings, _events, _metrics
from torch_xla._core.device import background, client, transfer
from torch_xla._core.execute import auto_barrier, region
from torch_xla._core.execute.untraced import skip, untraced
from torch_xla._core.job import pending_collectives
from torch_xla._core.report import debug_level, loop_report
from torch_xla._errors import raise_first

R = TypeVar("R")

# One barrier at a time: a second one would run, and donate, what the first is running. Buffers are handed out under it
# too: a program that is about to run sees who has one that it wants to write over (csrc/cut/packing.cpp).
_lock = threading.RLock()
_stages: Any = None  # the module that runs them, once it is imported
_importing: Future[Any] | None = None


def _free_lock() -> None:
    global _lock, _importing
    _lock, _importing = threading.RLock(), None


def _finish_before_fork() -> None:
    """Waits for graphs that run in threads, which a forked child would not have."""
    if _stages is not None:
        with _lock:
            stages().finish_all()


os.register_at_fork(before=_finish_before_fork, after_in_child=_free_lock)  # the thread that had it is not in the child


class _ThreadDevice(threading.local):
    device: int | None = None


_thread_device = _ThreadDevice()


@contextmanager
def of_device(index: int) -> Iterator[None]:
    """A scope in which barriers of this thread are of one device: other threads record for the others."""
    before, _thread_device.device = _thread_device.device, index
    try:
        yield
    finally:
        _thread_device.device = before


@untraced
def sync(index: int | None = None, wait: bool = False, cause: str = debug_level.SYNC) -> None:
    """Computes everything pending on a device, or on all that have some that this thread has to do with.

    `cause` is what asks for it, as the analyses print it. Raises RuntimeError where lowering, compiling or running
    failed; what depends on it keeps the values of the last barrier.
    """
    index = _thread_device.device if index is None else index
    with _events.span("barrier", lambda: (cause, _bindings.user_frame())):
        ran = False
        failed: list[Exception] = []  # one device's failure is no other's
        for device in range(_bindings.device_count()) if index is None else (index,):
            try:
                region.refuse_captured("a barrier", device)
                failed += _cut_segments(device)
                if _bindings.has_pending(device):
                    _barrier(device, _bindings.Cut.of_device(device), cause)
                    ran = True
                    with _lock:
                        _bindings.fill_tensors(device)
                _bindings.end_call_trace(device)
                if wait or _bindings.in_flight(device).failures:
                    _wait(device)
            except Exception as error:
                failed.append(error)
        raise_first(failed)
        if ran:
            loop_report.step_done()


def evaluate(
    tensors: Sequence[torch.Tensor],
    wait: bool = False,
    *,
    reading: bool = False,
    donates: bool = False,
    cause: str = debug_level.READ,
) -> None:
    """Computes these tensors, of any devices, and what they need, and leaves the rest of the graph pending.

    Where collectives are pending everything is computed: none runs twice, and all run in the order of recording. A very
    small graph behind a read that has none of them leaves them pending. With `reading` the values go to the host next,
    so a very small graph is computed there; with `donates` the program may write over buffers that the user donates.
    """
    donate = _bindings.Cut.Donate.DONORS if donates else _bindings.Cut.Donate.NOTHING
    by_device: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device.index, []).append(tensor)
    failed: list[Exception] = []
    for device, group in by_device.items():
        try:
            region.refuse_captured("a read", device)
            failed += _cut_segments(device)
            cut = _bindings.Cut.of_tensors(group, _bindings.Cut.Scope.LIVE, donate)
            if pending_collectives.any_on(device):
                # Not before there is a client: to start it may make the job's connection, which runs what is pending.
                if reading and client.client_started() and _on_host(cut):
                    continue
                cut = _bindings.Cut.of_device(device)
            _barrier(device, cut, cause, reading)
            if wait:
                _wait(device)
        except Exception as error:
            failed.append(error)
    raise_first(failed)


def buffers(tensors: Sequence[torch.Tensor], wait: bool = False) -> list[Any]:
    """The device buffers of tensors, which are computed first, and with `wait` are there.

    As long as someone has one of them no program writes over it: it is given a copy.
    """
    with _lock:
        evaluate(tensors, wait)
        return [_computed_value(tensor, _bindings.buffer_of, partial(evaluate, [tensor], wait)) for tensor in tensors]


def exclusive() -> AbstractContextManager[Any]:
    """A scope in which no program is started, by any thread: what is handed out here is not written over."""
    return _lock


def location(tensor: torch.Tensor) -> tuple[Any, int]:
    """Computes a tensor and returns where its values are; to be called within `exclusive`."""
    return _computed_value(tensor, _bindings.location_of, partial(evaluate, [tensor]))


def _computed_value(tensor: torch.Tensor, find: Callable[[torch.Tensor], R | None], compute: Callable[[], None]) -> R:
    """The result of `find` once the tensor is computed; another thread may write it again meanwhile."""
    while (result := find(tensor)) is None:
        compute()
    return result


def _values_of(tensor: torch.Tensor) -> torch.Tensor | tuple[Any, int] | None:
    """A copy of a tensor's values where they are on the host, or where they are; None where they are to be computed."""
    values: torch.Tensor | None = _bindings.copy_on_host(tensor)
    return _bindings.location_of(tensor) if values is None else values


def fetch(tensor: torch.Tensor, device: int) -> torch.Tensor:
    """The values of an xla tensor, on a device, as a new CPU tensor."""
    direct_value = _read_directly(tensor, device)
    return _fetch(tensor) if direct_value is None else direct_value


def _read_directly(tensor: torch.Tensor, device: int) -> torch.Tensor | None:
    if _stages is None or pending_collectives.any_on(device) or not stages().reads_directly(device):
        return None
    with _lock:
        direct_value = _bindings.read_directly(tensor)
    if direct_value is None:
        return None
    values, computed = direct_value
    if computed:
        _metrics.count("HostCompute")
    return values


skip(_read_directly, fetch)  # as `untraced`, without a scope: no function of PyTorch's is called there


@untraced
def _fetch(tensor: torch.Tensor) -> torch.Tensor:
    region.refuse_captured("a read")
    with _events.span("read", _bindings.user_frame):
        with _lock:
            source: Any = _computed_value(tensor, _values_of, partial(evaluate, [tensor], reading=True))
        return source if isinstance(source, torch.Tensor) else transfer.download(source, tensor.shape, tensor.dtype)


def wait(index: int | None = None) -> None:
    """Returns when what was started on a device, or on all, has finished."""
    failed: list[Exception] = []
    for device in range(_bindings.device_count()) if index is None else (index,):
        try:
            _wait(device)
        except Exception as error:
            failed.append(error)
    raise_first(failed)


def query(index: int) -> bool:
    """Whether a device has computed all that was recorded; starts what is pending, and does not wait.

    Raises RuntimeError where something of it failed.
    """
    if _bindings.has_pending(index):
        sync(index)
    if not _bindings.in_flight(index).idle:
        return False
    _wait(index)  # for nothing; but what failed is raised
    return True


def _wait(device: int) -> None:
    region.refuse_captured("a wait", device)
    if _stages is not None:
        with _lock:
            stages().finish(device)
    if client.client_started():
        from torch_xla._core.execute import executor

        executor.wait(device)


@untraced
def _barrier(device: int, cut: _bindings.Cut, cause: str, reading: bool = False) -> None:
    with _lock:
        _bindings.drain_released()
        marks = pending_collectives.take(device)
        stages().run(cut, cause, reading)
        del marks


@untraced
def _on_host(cut: _bindings.Cut) -> bool:
    with _lock:
        computed: bool = stages().compute_on_host(cut)
        return computed


def _cut_segments(device: int) -> list[Exception]:
    """Runs the segments of a loop that were found in what is pending; gives what failed."""
    if not _bindings.segment_ends(device):
        return []
    with _lock:
        stages().finish(device)
        return auto_barrier.flush(device, _run_segment, stages().plan.has_run_before)


@untraced
def cut_loop(device: int) -> None:
    """Looks for a loop in what was recorded on a device, or cuts segments of one that was found."""
    with _lock:
        auto_barrier.look(device, _run_segment, _compiles)


def _run_segment(device: int, cut: _bindings.Cut) -> None:
    _barrier(device, cut, debug_level.AUTO)


def _compiles(device: int) -> bool:
    return bool(stages().inspected() or not stages().hotness.counts(device))


def stages() -> Any:
    """The stages, once there is work: they import JAX."""
    return _import_stages() if _stages is None else _stages


def _import_stages() -> Any:
    """Imports the stages in a thread of its own, which no signal handler interrupts.

    One that reads meanwhile waits for all of them, where it would find half a module in its own thread. Who is
    importing does it here: the other thread might wait for what is being imported.
    """
    global _stages, _importing
    if _is_importing():
        from torch_xla._core.execute import pipeline

        return pipeline
    with _lock:
        result = _importing
        if result is None:
            result = _importing = Future()
            try:
                background.start("import", _import_into, result)
            except RuntimeError:  # at the interpreter's end
                _import_into(result)
        try:
            _stages = result.result()
        finally:
            if result.done():
                _importing = None
    client.choose_plugin()  # before the first cut
    return _stages


def _import_into(result: Future[Any]) -> None:
    try:
        from torch_xla._core.execute import pipeline

        result.set_result(pipeline)
    except BaseException as error:
        result.set_exception(error)


def _is_importing() -> bool:
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "importlib._bootstrap":
        frame = frame.f_back
    return frame is not None
