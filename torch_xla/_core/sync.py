"""Barriers and reads: what is computed when. How is in `pipeline.py`, which runs the stages."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from torch_xla import _bindings, _config, _fallbacks, _metrics, _timeline
from torch_xla._core import auto_barrier, region
from torch_xla._core.device import client, packing, transfer
from torch_xla._core.graph import graph
from torch_xla._core.job import pending, same_program
from torch_xla._core.report import debug_level, loop_report
from torch_xla._core.untraced import untraced
from torch_xla._errors import raise_first
from torch_xla.ops import checks, collective_call
from torch_xla.ops.registry import Meta

R = TypeVar("R")

# One barrier at a time: a second one would run, and donate, what the first is running. Buffers are handed out under it
# too: a program that is about to run sees who has one that it wants to write over (csrc/packing.cpp).
_lock = threading.RLock()


def _free_lock() -> None:
    global _lock
    _lock = threading.RLock()


def _finish_before_fork() -> None:
    """Waits for graphs that run in threads, which a forked child would not have."""
    if _pipeline.cache_info().currsize:
        with _lock:
            _pipeline().finish_all()


os.register_at_fork(before=_finish_before_fork, after_in_child=_free_lock)  # the thread that had it is not in the child


class _Own(threading.local):
    device: int | None = None


_own = _Own()


@contextmanager
def of_device(index: int) -> Iterator[None]:
    """A scope in which barriers of this thread are of one device: other threads record for the others."""
    before, _own.device = _own.device, index
    try:
        yield
    finally:
        _own.device = before


@untraced
def sync(index: int | None = None, wait: bool = False, cause: str = debug_level.SYNC) -> None:
    """Computes everything pending.

    Args:
        index: Device, or None for every device with pending work that this thread has to do with.
        wait: Return only when the devices have finished.
        cause: What asks for it, as the analyses print it.

    Raises:
        RuntimeError: Lowering, compiling or running failed; what depends on it keeps the values of the last barrier.
    """
    index = _own.device if index is None else index
    with _timeline.span("barrier", lambda: (cause, _bindings.user_frame())):
        ran = False
        failed: list[Exception] = []  # one device's failure is no other's
        for device in range(_bindings.device_count()) if index is None else (index,):
            try:
                region.refuse_captured("a barrier", device)
                failed += _cut_pieces(device)
                if _bindings.has_pending(device):
                    _barrier(device, _bindings.Cut.of_device(device), cause)
                    ran = True
                _bindings.end_stream(device)
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
    give: bool = False,
    cause: str = debug_level.READ,
) -> None:
    """Computes these tensors and what they need, and leaves the rest of the graph pending.

    Where collectives are pending everything is computed: none runs twice, and all run in the order of recording. A very
    small graph behind a read that has none of them leaves them pending.

    Args:
        tensors: Tensors on device xla, of any devices.
        wait: Return only when the devices have finished.
        reading: Their values go to the host next, so a very small graph is computed there.
        give: The program may write over buffers that were given away.
        cause: What asks for it, as the analyses print it.
    """
    donate = _bindings.Cut.Donate.GIVEN if give else _bindings.Cut.Donate.NOTHING
    by_device: dict[int, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_device.setdefault(tensor.device.index, []).append(tensor)
    failed: list[Exception] = []
    for device, group in by_device.items():
        try:
            region.refuse_captured("a read", device)
            failed += _cut_pieces(device)
            cut = _bindings.Cut.of_tensors(group, _bindings.Cut.Scope.LIVE, donate)
            if pending.any_on(device):
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
    """The device buffers of tensors, which are computed first.

    As long as someone has one of them no program writes over it: it is given a copy.

    Args:
        tensors: Tensors on device xla.
        wait: Return only when the devices have finished.
    """
    with _lock:
        evaluate(tensors, wait)
        return [_held(tensor, _bindings.buffer_of, partial(evaluate, [tensor], wait)) for tensor in tensors]


def exclusive() -> AbstractContextManager[Any]:
    """A scope in which no program is started, by any thread: what is handed out here is not written over."""
    return _lock


def location(tensor: torch.Tensor) -> tuple[Any, int]:
    """Where a tensor's values are, which is computed first; to be asked for within `exclusive`."""
    return _held(tensor, _bindings.location_of, partial(evaluate, [tensor]))


def _held(tensor: torch.Tensor, find: Callable[[torch.Tensor], R | None], compute: Callable[[], None]) -> R:
    """What `find` gives once the tensor is computed; another thread may have written it again by then."""
    while (found := find(tensor)) is None:
        compute()
    return found


def _values_of(tensor: torch.Tensor) -> torch.Tensor | tuple[Any, int] | None:
    """A copy of a tensor's values where they are on the host, or where they are; None where they are to be computed."""
    values: torch.Tensor | None = _bindings.copy_on_host(tensor)
    return _bindings.location_of(tensor) if values is None else values


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

    Raises:
        RuntimeError: Something of it failed.
    """
    if _bindings.has_pending(index):
        sync(index)
    if not _bindings.in_flight(index).idle:
        return False
    _wait(index)  # for nothing; but what failed is raised
    return True


def _wait(device: int) -> None:
    region.refuse_captured("a wait", device)
    if _pipeline.cache_info().currsize:
        with _lock:
            _pipeline().finish(device)
    if client.client_started():
        from torch_xla._core.run import executor

        executor.wait(device)


@untraced
def _barrier(device: int, cut: _bindings.Cut, cause: str, reading: bool = False) -> None:
    with _lock:
        _bindings.drain_released()
        marks = pending.take(device)
        _pipeline().run(cut, cause, reading)
        del marks


@untraced
def _on_host(cut: _bindings.Cut) -> bool:
    with _lock:
        computed: bool = _pipeline().compute_on_host(cut)
        return computed


def _cut_pieces(device: int) -> list[Exception]:
    """Runs the pieces of a loop that were found in what is pending; gives what failed."""
    if not _bindings.piece_ends(device):
        return []
    with _lock:
        _pipeline().finish(device)
        return auto_barrier.flush(device, _run_piece, _pipeline().plan.is_known)


def _run_piece(device: int, cut: _bindings.Cut) -> None:
    _barrier(device, cut, debug_level.AUTO)


def _compiles(device: int) -> bool:
    stages = _pipeline()
    return bool(stages.inspected() or not stages.hotness.counts(device))


@functools.cache
def _pipeline() -> Any:
    """The stages, once there is work: they import JAX."""
    from torch_xla._core import pipeline

    return pipeline


@untraced
def graph_text(tensors: Sequence[torch.Tensor], form: str) -> Any:
    """The pending graph of some tensors, without running it.

    Args:
        tensors: Tensors on one device; none means everything pending on the current device.
        form: ``"text"``, ``"dot"``, ``"hlo"``, ``"hlo_proto"``, ``"stablehlo"`` or ``"stablehlo_bytecode"``.

    Returns:
        The text, or bytes for the protobuf message and the bytecode.
    """

    def render() -> Any:
        cut = (
            _bindings.Cut.of_tensors(list(tensors)) if tensors else _bindings.Cut.of_device(_bindings.current_device())
        )
        _pipeline().finish(cut.device)
        return _pipeline().render(graph.describe(cut.preview()), form, _computed(tensors))

    with _lock:
        return _pipeline().numbers.settled(render)


@dataclass(frozen=True)
class Program:
    """A lowered graph and its inputs, which no barrier writes over.

    Attributes:
        stage: JAX's lowered stage.
        inputs: Shape and dtype of each leaf.
        locations: Where their values are.
        numbers: The vectors of numbers, which are the last inputs.
        device: Index of the device.
    """

    stage: Any
    inputs: Sequence[Any]
    locations: Sequence[Any]
    numbers: Sequence[Any]
    device: int

    def host_inputs(self) -> list[torch.Tensor]:
        """A copy of each input on the host."""
        pairs = zip(self.locations, self.inputs, strict=True)
        leaves = [transfer.download(location, meta.shape, meta.dtype) for location, meta in pairs]
        return leaves + [torch.tensor(vector) for vector in self.numbers]

    def device_inputs(self) -> list[torch.Tensor]:
        """A copy of each input on the device."""
        pairs = zip(self.locations, self.inputs, strict=True)
        leaves = [
            _bindings.tensor_of(transfer.copy(location, meta.shape), list(meta.shape), meta.dtype, self.device)
            for location, meta in pairs
        ]
        return leaves + [torch.tensor(vector).to(torch.device("xla", self.device)) for vector in self.numbers]


@untraced
def lowered(tensors: Sequence[torch.Tensor], name: str, platform: str | None = None) -> Program:
    """The program for some tensors on one device, without running it.

    Args:
        tensors: The tensors.
        name: Name of the module.
        platform: Another kind of device that it is for, as `lowering.lower` takes it.
    """
    from torch_xla._core.lower import lowering

    def lower() -> Program:
        what = _bindings.Cut.of_tensors(list(tensors))
        _pipeline().finish(what.device)
        cut = what.preview()
        _pipeline().fills.provide(cut)
        described = graph.describe(cut)
        stage = lowering.lower(described, name, platform=platform).stage
        vectors = [vector for vector in cut.packed_numbers() if vector.size]
        return Program(stage, described.leaves, cut.leaf_locations(), vectors, cut.device)

    with _lock:
        return _pipeline().numbers.settled(lower)


def _computed(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Shape and dtype of those tensors that are no part of a graph any more."""
    return [Meta(tuple(t.shape), t.dtype) for t in tensors if _bindings.location_of(t) is not None]


class _Hooks:
    """What the recorder asks of Python."""

    @untraced
    def upload(self, tensor: torch.Tensor, index: int, number: int, kept: bool) -> Any:
        """Brings a CPU tensor to a device; one that is `kept` as it is need not be copied."""
        return transfer.upload(tensor, index, number, kept)

    def put(self, numbers: Any, index: int) -> Any:
        """Copies the numbers of a graph to a device."""
        _metrics.count("DeviceDataCacheMiss")
        return transfer.put(numbers, index)

    def explain(self, token: Any, index: int) -> None:
        """Raises what a run that failed has to say."""
        transfer.finish(token, index)

    @untraced
    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of an xla tensor as a new CPU tensor."""
        region.refuse_captured("a read")
        with _timeline.span("read", _bindings.user_frame):
            with _lock:
                found: Any = _held(tensor, _values_of, partial(evaluate, [tensor], reading=True))
            return found if isinstance(found, torch.Tensor) else transfer.download(found, tensor.shape, tensor.dtype)

    @untraced
    def copy(self, buffers: list[Any]) -> list[Any]:
        """Copies of device buffers, each on its device."""
        return transfer.copies(buffers)

    @untraced
    def pack(self, buffers: list[Any], stacked: bool) -> Any:
        """Several device buffers in one, end to end or as an array of them."""
        return packing.stack(buffers) if stacked else packing.pack(buffers)

    @untraced
    def member(self, stack: Any, index: int) -> Any:
        """One of an array's members as a buffer of its own."""
        return transfer.member(stack, index)

    @untraced
    def unpack(self, buffer: Any, shapes: tuple[tuple[int, ...], ...]) -> list[Any]:
        """The parts of such a buffer, each as one of its own."""
        return packing.unpack(buffer, shapes)

    def evaluate(self, tensors: list[torch.Tensor]) -> None:
        """Computes tensors at once, in eager mode."""
        with _metrics.eager_operation():
            evaluate(tensors)

    @untraced
    def cut_loop(self, index: int) -> None:
        """Looks for a loop in what was recorded on a device, or cuts pieces of one that was found."""
        with _lock:
            auto_barrier.look(index, _run_piece, _compiles)

    @untraced
    def query(self, index: int) -> bool:
        """Whether a device has computed all that was recorded."""
        return query(index)

    @untraced
    def synchronize(self, index: int) -> None:
        """Computes all that was recorded on a device, and waits for it."""
        sync(index, wait=True)

    def note_read(self, op: str) -> None:
        """Counts an operator that gives a value to Python."""
        _metrics.count(op)

    def is_lowered(self, op: str) -> bool:
        """Whether an operator has a rule or a decomposition, and so takes every type that XLA has."""
        from torch_xla.ops.call import way_of

        return way_of(op) != "callback"

    @untraced
    def needs_host(self, op: str) -> bool:
        """Whether an operator runs on the host between two programs, because those of this device cannot call it."""
        if op == collective_call.NAME:
            from torch_xla._core.run import host_collective

            return host_collective.needed()
        # What is not asked imports no rules. Operators of this package are its own ways to say something to a program.
        return not (client.is_own_cpu() or op.startswith("xla.") or self.is_lowered(op) or client.has_callbacks())

    @untraced
    def check_call(self, op: str, recorded: str, arguments: tuple[Any, ...], result_bytes: int, ask: Any) -> float:
        """Raises where PyTorch refuses a call, as `checks.check_call` says."""
        return checks.check_call(op, recorded, arguments, result_bytes, ask)

    def note_host_op(self, op: str, reason: str) -> None:
        """Takes notice of an operator that runs on the host between two graphs."""
        _fallbacks.between_graphs(op, reason, _bindings.user_frame())


def install() -> None:
    """Connects the recorder; called once, at import."""
    _bindings.set_python_hooks(_Hooks())
    if _config.XLA_USE_32BIT_LONG.get():
        _bindings.send_all_at_once()
    auto_barrier.initialize()
    pending.add_runner(sync)
    transfer.set_agreement(same_program.gather, same_program.settle)
