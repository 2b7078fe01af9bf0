"""The one function that runs all stages: cut → look up → (lower → compile) → run → attach."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_xla import _bindings, _capture, _config, _fallbacks, _files, _metrics, _timeline
from torch_xla._core import hotness, region
from torch_xla._core.compile import cache, compiler, dispatch
from torch_xla._core.device import client, failures, memory, placement, splits, transfer
from torch_xla._core.graph import graph, graph_text, verify
from torch_xla._core.job import agreement, same_program, session
from torch_xla._core.lower import lowering, numbers, rolling
from torch_xla._core.report import debug_level, loop_report, retrace
from torch_xla._core.run import by_operator, executor, split_check, value_check
from torch_xla._errors import ExecutionError, GraphLimitError, OutOfMemoryError, message, raise_first
from torch_xla.ops import fallback
from torch_xla.ops.registry import Meta, StaticNumbers

_REMEMBERED = 1 << 14
_by_host: dict[tuple[str, int], tuple[str, str]] = {}  # graphs that no program computes: what wants the host, and why

# What looks at each program before it runs.
_WATCHING = _config.Watch(*memory.ASKED_BY, *debug_level.ASKED_BY, *split_check.ASKED_BY, *value_check.ASKED_BY)


@dataclass
class _Barrier:
    """What is asked for, and what came of it so far.

    Attributes:
        cut: What its graph is to be made of.
        cause: What asks for it, as the analyses print it.
        reading: Its values go to the host next, so a very small graph is computed there.
        name: What its graph is called, in a region.
        weighed: Whether it was asked what to run instead.
        divided: Whether the small parts of its graph are computed on the host, and the rest apart from them.
        waits: Whether the host waits for a graph that runs operator by operator.
        failures: What to raise once all that can run has been started.
    """

    cut: _bindings.Cut
    cause: str
    reading: bool
    name: str | None = None
    weighed: bool = False
    divided: bool = False
    waits: bool = False
    failures: list[Exception] = field(default_factory=list)


def run(what: _bindings.Cut, cause: str, reading: bool) -> None:
    """Cuts a graph and runs it.

    Args:
        what: What it is to be made of.
        cause: What asks for it, as the analyses print it.
        reading: Its values go to the host next, so a very small graph is computed there.

    Raises:
        GraphLimitError: It may not run here; it stays pending.
        OutOfMemoryError: It does not fit.
        ExecutionError: A graph that was started earlier failed; this one has been started all the same.
        RuntimeError: Lowering, compiling or starting failed. Here and where it did not fit, what depends on the failed
            operators has the values of the last barrier again, and the rest has been started.
    """
    finish(what.device)
    _run_all([what], _Barrier(what, cause, reading))


def _run_all(waiting: list[_bindings.Cut], barrier: _Barrier) -> None:
    try:
        while waiting:
            waiting[:1] = numbers.settled(_attempt, waiting[0], barrier)
    except BaseException as raised:  # an interrupt, say, or a limit
        for failure in barrier.failures:
            raised.add_note(f"a failure before that: {failure}")
        barrier.failures.clear()
        raise
    raise_first(barrier.failures)


@dataclass
class _Ahead:
    """A graph that runs operator by operator while the host records on."""

    run: _bindings.OperatorRun
    cut: _bindings.Graph
    barrier: _Barrier


_ahead: dict[int, _Ahead] = {}


def finish(device: int) -> None:
    """Waits for a graph that runs operator by operator on a device, and gives its results to the tensors.

    Raises:
        RuntimeError: An operator failed; as `run` says it of a graph whose start failed.
    """
    found = _ahead.get(device)
    if found is None:
        return
    barrier = found.barrier
    try:
        by_operator.finish(found.run)
        left = []
    except (StaticNumbers, numbers.CutAgain):
        found.cut.clear()
        barrier.cut.again = True
        left = [barrier.cut]
    except Exception as error:
        _raise_interrupt()
        left = _apart(error, found.cut, barrier)
    del _ahead[device]  # not where an interrupt came
    barrier.waits = True
    _run_all(left, barrier)


def finish_all() -> None:
    """Likewise on all devices."""
    failed: list[Exception] = []
    for device in list(_ahead):
        try:
            finish(device)
        except Exception as error:
            failed.append(error)
    raise_first(failed)


def _finish_at_exit() -> None:
    _ahead.clear()  # its end is waited for


def _attempt(what: _bindings.Cut, barrier: _Barrier) -> list[_bindings.Cut]:
    """Cuts a graph and runs it; gives what is to be tried next, in order, where it failed."""
    watched = _watched()
    try:
        with _timeline.span("cut") if watched else _timeline.NOTHING:
            cut = what.graph()
    except RuntimeError:
        if barrier.failures:
            return []  # it needs what was lost
        raise
    later = client.spmd() and cut.num_outputs > 0  # then the compiled program says how they are split
    if cut.has_fills and not later:
        try:
            provide_fills(cut)
        except OutOfMemoryError as error:
            return _apart(error, cut, barrier)
    try:
        outputs = cut.num_outputs
        if not outputs:
            return []
        first = what is barrier.cut
        if watched and first:  # a region does not see its graph's parts
            barrier.name = region.before_run(cut.key, _bindings.user_frame, lambda: graph.describe(cut))
        if barrier.reading and first:
            if cut.fits_host and not cut.has_fills and _run_on_host(cut):
                return []
            if not (barrier.weighed or region.stack() or _knows(cut)):
                barrier.weighed = what.again = True
                cut.clear()  # it holds what others may write over
                return [_instead(what) or what]
            if not (barrier.divided or region.stack() or later or _knows(cut)):
                parts = by_operator.divide(cut, what)
                if parts:
                    barrier.divided = True
                    cut.clear()
                    return [*parts, what]
        if barrier.divided and cut.is_small_part and _run_on_host(cut):
            return []
        # The steady state of a loop: nothing else of it is Python code from here to the results.
        if watched or cut.has_fills or not cache.run(cut):
            _run_by_stages(cut, barrier, first and not watched)
        if barrier.reading and first:
            loop_report.value_read(outputs, cut.device)
        return []
    except GraphLimitError:  # before anything ran: the graph stays pending
        raise
    except (StaticNumbers, numbers.CutAgain):
        what.again = True
        raise
    except ExecutionError as late:  # so it does here, without what needs the lost values
        barrier.failures.append(late)
        cut.clear()  # the error holds it
        return [what]
    except Exception as error:
        _raise_interrupt()
        if not client.client_started():
            raise  # it says why there is no device, and is no graph's failure: that stays pending
        return _apart(error, cut, barrier)


def _instead(what: _bindings.Cut) -> _bindings.Cut | None:
    """What to run where a value is read and the graph for it would be a new one, or None: a read costs a read.

    All that is pending, where that is a graph that is known: the loop's body mostly, which ends here. Or the value
    alone, where such a graph is about to come: what the value needs is computed twice in this step, and no part of the
    body gets a graph of its own. After the end of a loop without barriers again all that is pending: other values are
    read next.
    """
    whole = _bindings.Cut.of_device(what.device)
    known = is_known(whole)
    if known:
        return whole
    needed = what.needed()
    if needed is not None and _bindings.whole_comes(what.device):
        return needed
    return whole if known is not None and _bindings.was_cut(what.device) else None


def compute_on_host(what: _bindings.Cut) -> bool:
    """Computes a graph behind a read with PyTorch's CPU kernels, if it is very small and has no collective.

    Args:
        what: What the graph is to be made of; it stays pending where this is False.
    """
    finish(what.device)
    cut = what.graph()
    try:
        alone = bool(cut.num_outputs) and cut.fits_host and not region.stack()
        return alone and not cut.has_fills and _run_on_host(cut)
    finally:
        cut.clear()  # it holds what others may write over, also where a kernel raised


def _run_on_host(cut: _bindings.Graph) -> bool:
    if not (by_operator.on() and by_operator.run(cut)):
        return False
    _metrics.count("HostCompute")
    return True


def _knows(cut: _bindings.Graph) -> bool:
    """Whether a graph is no new one: it has a program, or ran without."""
    return cache.knows(cut) or (hotness.counts(cut.device) and hotness.knows(cut))


def is_known(what: _bindings.Cut) -> bool | None:
    """Whether a graph has a program in memory, or ran without; None where nothing is to be computed. It stays pending.

    Args:
        what: What the graph is to be made of.
    """
    finish(what.device)
    cut = what.graph()
    if not cut.num_outputs:
        return None
    if cut.has_fills:
        provide_fills(cut)
    known = _knows(cut)
    cut.clear()
    return known


def _apart(error: Exception, cut: _bindings.Graph, barrier: _Barrier) -> list[_bindings.Cut]:
    """Takes notice of a graph's failure; gives what is left of it."""
    failure, parts = failures.of_graph(error, cut, barrier.name)
    if failure is not None:
        barrier.failures.append(failure)
    return parts


def _raise_interrupt() -> None:
    interrupt = fallback.take_interrupt()
    if interrupt is not None:
        try:
            raise interrupt
        finally:
            del interrupt


def _watched() -> bool:
    """Whether somebody looks at the stages of each run, or has a say in it."""
    return bool(_timeline.recorder or _capture.on or region.stack()) or inspected()


def inspected() -> bool:
    """Whether somebody wants to see each program with its graph before it runs, or may forbid it."""
    return bool(not region.allowed or dispatch.disturbed()) or _WATCHING.any_set()


def _run_by_stages(cut: _bindings.Graph, barrier: _Barrier, ahead: bool) -> None:
    cause, name = barrier.cause, barrier.name
    with _timeline.span("look up"):
        executable = cache.find(cut)
    new = executable is None
    if executable is None:
        numbers.compare(cut)
        executable = cache.find(cut)
        if executable is None:
            if _runs_without(cut, barrier, ahead):
                return
            try:
                if known := _by_host.get(hotness.key_of(cut)):
                    raise fallback.NeedsHost(*known)
                executable = _first_use(cut, cause, name)
            except fallback.NeedsHost as needed:
                _run_by_host(cut, needed)
                return
    if cut.has_fills:
        provide_fills(cut, executable.program.input_places)
    if new and client.spmd():
        same_program.compare(cut)
    memory.before_run(executable.loaded, cut, name)
    debug_level.before_run(cut, cause, name)
    split_check.before_run(cut)
    value_check.before_run(cut)
    executor.run(executable, cut)


def captured(what: _bindings.Cut, compiles: bool) -> tuple[_bindings.Graph, compiler.Executable | None]:
    """Cuts a graph that is captured.

    Args:
        what: What it is made of.
        compiles: Whether its program is wanted now; else it is only lowered, after which it is not cut again.

    Returns:
        The graph, and its program. Nothing ran.
    """
    cut = what.graph()
    what.again = True
    executable = cache.find(cut) if cut.num_outputs else None
    if executable is None and cut.num_outputs:
        numbers.compare(cut)
        numbers.take_wanted()
        if compiles:
            executable = program_of(cut)
        else:
            compiler.lower(graph.describe(cut), "graph")
    return cut, executable


def program_of(cut: _bindings.Graph) -> compiler.Executable:
    """The program of a graph that was captured.

    Raises:
        RuntimeError: A part of it runs on the host, which no program of the device can call.
    """
    executable = cache.find(cut)
    if executable is None:
        try:
            executable = _first_use(cut, debug_level.CAPTURE, region.name())
        except fallback.NeedsHost as needed:
            what = f"got {needed.op}, which runs on the host ({needed.reason}),"
            raise RuntimeError(message("graph", what, do="leave it out of the capture")) from None
        if client.spmd():
            same_program.compare(cut)
    return executable


def _runs_without(cut: _bindings.Graph, barrier: _Barrier, ahead: bool) -> bool:
    """Runs a graph that has no program operator by operator; False where it is to be compiled.

    Args:
        cut: The graph.
        barrier: What it is for.
        ahead: Whether the host may record on meanwhile.
    """
    if inspected() or not hotness.counts(cut.device) or hotness.is_due(cut):
        return False
    numbers.take_wanted()
    hotness.note(cut)
    if cut.has_fills:
        provide_fills(cut)
    if not ahead or barrier.reading or barrier.waits or cut.fits_host:
        done = by_operator.run(cut)
    else:
        running = by_operator.begin(cut)
        done = running is not None and (running.start() or by_operator.complete(running))
        if running is not None and done and cut.num_outputs:
            if not _ahead:
                atexit.unregister(_finish_at_exit)
                atexit.register(_finish_at_exit)
            _ahead[cut.device] = _Ahead(running, cut, barrier)
    if done:
        _metrics.count("UncompiledRun")
    return done


def _run_by_host(cut: _bindings.Graph, needed: fallback.NeedsHost) -> None:
    """Runs a graph operator by operator that no program computes: a part of it wants the host, which none can call.

    Operators without any lowering are no part of a graph there (`needs_host` in `sync.py`). Others show it late: by a
    decomposition that ends in one, arguments that a rule does not take, or functions of JAX's.

    Args:
        cut: The graph.
        needed: What wants the host.

    Raises:
        RuntimeError: Nor can operators be run for themselves there.
    """
    if cut.has_fills:
        provide_fills(cut)
    key = hotness.key_of(cut)
    if session.connected() is not None or not by_operator.run(cut):
        what = f"got {needed.op}, which runs on the host ({needed.reason})"
        where = f"what programs of {client.device_type()} compute, which cannot call the host"
        failure: Any = RuntimeError(message("run", what, expected=where, do="compute it with .cpu()"))
        failure.nodes = () if needed.node is None else lowering.alike(graph.describe(cut), needed.node)
        raise failure from None
    _metrics.count("HostGraph")
    _fallbacks.between_graphs(needed.op, f"{needed.reason}, and all of its graph with it", _bindings.user_frame())
    if len(_by_host) >= _REMEMBERED:
        _by_host.clear()
    _by_host[key] = needed.op, needed.reason


def _first_use(cut: _bindings.Graph, cause: str, name: str | None) -> compiler.Executable:
    """A program that this process has not run yet, from the disk or compiled."""
    with lowering.uncollected():
        described = rolling.decide(cut)
    # Where programs span the job the first one makes the connection.
    if session.connected() is None and not (session.rank_info().world > 1 and client.spans_job()):
        return cache.load(cut) or _compile(cut, described, cause, name)
    described = described or graph.describe(cut)
    agreement.prepare(described)
    executable = cache.load(cut) or _compile(cut, described, cause, name)
    agreement.announce(executable.program, described)
    return executable


def _compile(cut: _bindings.Graph, described: graph.Graph | None, cause: str, name: str | None) -> compiler.Executable:
    numbers.take_wanted()
    with lowering.uncollected():
        described = described or graph.describe(cut)
        if _config.XLA_VERIFY_GRAPHS.get():
            verify.verify(described)
        _dump(described)
        lowered = compiler.lower(described, name or "graph")
    retrace.note(described, _bindings.user_frame(), name, hotness.knows(cut))
    debug_level.before_compile(described, cause, name)
    executable = compiler.compile_lowered(cut, lowered, name or "graph")
    debug_level.after_compile(executable)
    cache.add(cut, executable)
    return executable


def provide_fills(cut: _bindings.Graph, places: Sequence[int] = ()) -> None:
    """Gives buffers to those leaves of a graph that are still to be filled with a number.

    Args:
        cut: The graph.
        places: Placement number of each of its leaves, where its program is known.

    Raises:
        OutOfMemoryError: There is no room for some.
    """
    buffers: list[Any] = []
    found: list[int] = []
    errors: dict[int, OutOfMemoryError] = {}
    for i, ((shape, dtype), number, line, slot, where) in enumerate(cut.describe_fills()):
        if where == splits.ANYWHERE:
            where = places[slot] if places and slot >= 0 else splits.WHOLE
        found.append(where)
        try:
            buffers.append(transfer.fill(shape, dtype, number, cut.device, line, where))
        except OutOfMemoryError as error:
            errors[i] = error
    if errors:
        first, *others = errors.values()
        for other in others:
            first.add_note(str(other))
        first.fills = tuple(errors)
        try:
            raise first
        finally:
            del first, others, errors  # they would hold themselves, with the caller's variables
    cut.provide_fills(buffers, found)


def _dump(described: graph.Graph) -> None:
    path = _config.XLA_SAVE_TENSORS_FILE.get()
    if path is not None:
        text = render(described, _config.XLA_SAVE_TENSORS_FMT.get())
        _files.append("graph", "XLA_SAVE_TENSORS_FILE", session.own_file(path), text)


def render(described: graph.Graph, form: str, computed: Sequence[Meta] = ()) -> Any:
    """A graph to look at.

    Args:
        described: The graph.
        form: ``"text"``, ``"dot"``, ``"hlo"``, ``"hlo_proto"``, ``"stablehlo"`` or ``"stablehlo_bytecode"``.
        computed: Further tensors to show in the text, whose values are on the device.

    Returns:
        The text, or bytes for the protobuf message and the bytecode.
    """
    if form == "text":
        if client.client_started():
            place = placement.of(described.device)
            described = rolling.rolled(described, place.platform, place.mesh)
        return graph_text.text(described, computed)
    if form == "dot":
        return graph_text.dot(described)
    stage = lowering.lower(described).stage
    if form == "hlo":
        return lowering.hlo_text(stage)
    if form == "hlo_proto":
        module: Any = stage.compiler_ir("hlo")
        return module.as_serialized_hlo_module_proto()
    if form == "stablehlo":
        return stage.as_text()
    if form == "stablehlo_bytecode":
        return lowering.bytecode(stage.compiler_ir("stablehlo"))
    raise ValueError(f"[graph] got form {form!r}, expected text, dot, hlo, hlo_proto, stablehlo or stablehlo_bytecode")
