"""The one function that runs all stages: cut → plan → look up → (lower → compile) → run → attach.

`plan.py` says which graphs a request comes to; here each is run, and what is left of one that failed is tried again.
What runs on a device is known by `_bindings.in_flight(device)` alone: programs that were started, the graph that runs
operator by operator while the host records on, and what failed with nobody there to be told.
"""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from typing import Any

from torch_xla import _bindings, _config, _events, _fallbacks, _files, _metrics
from torch_xla._core.compile import cache, compiler, dispatch, interruptible
from torch_xla._core.device import client, failures, memory_stats, placement
from torch_xla._core.execute import executor, fills, hotness, op_by_op, plan, region, split_check
from torch_xla._core.execute.plan import Request, Step, Way
from torch_xla._core.graph import graph, verify
from torch_xla._core.job import agreement, program_starts, same_program, session
from torch_xla._core.lower import lowering, numbers, rolling
from torch_xla._core.report import debug_level, loop_report, recompiles, render
from torch_xla._errors import ExecutionError, GraphLimitError, message, raise_first
from torch_xla.ops import fallback
from torch_xla.ops.registry import StaticNumbers

_REMEMBERED = 1 << 14
_by_host: dict[tuple[str, int], fallback.NeedsHost] = {}  # graphs that no program computes, and why

# What looks at each program before it runs.
_WATCHING = _config.Watch(
    *memory_stats.ASKED_BY, *debug_level.ASKED_BY, *split_check.ASKED_BY, _config.XLA_CHECK_VALUES
)


def run(what: _bindings.Cut, cause: str, reading: bool) -> None:
    """Cuts a graph and runs it; with `reading` its values go to the host next, so a very small one is computed there.

    Raises GraphLimitError where it may not run here, and stays pending, OutOfMemoryError where it does not fit,
    ExecutionError where a graph that was started earlier failed, and this one has been started all the same, and
    RuntimeError where lowering, compiling or starting failed. There, and where it did not fit, what depends on the
    failed operators has the values of the last barrier again, and the rest has been started.
    """
    lowering.check_not_inside()
    finish(what.device)
    request = Request(what, cause, reading)
    _run(request, [Step(what, Way.PLANNED)])


def _run(request: Request, steps: list[Step]) -> None:
    """Runs graphs one after the other, and what is left of those that fail; raises what failed at the end."""
    try:
        while steps:
            steps[:1] = _attempt(steps[0], request)
    except BaseException:  # an interrupt, say, or a limit
        _bindings.in_flight(request.cut.device).failures.extend(request.failures)
        request.failures.clear()
        raise
    raise_first(request.failures)


def finish(device: int) -> None:
    """Waits for a graph that runs operator by operator on a device, and gives its results to the tensors.

    Raises RuntimeError where an operator failed, as `run` says it of a graph whose start failed; or something failed
    earlier that nobody was told.
    """
    in_flight = _bindings.in_flight(device)
    running = in_flight.operator_run
    if running is not None:
        lowering.check_not_inside()
        request: Request = running.request
        _run(request, _finished(running, request))
    if in_flight.failures:
        untold = list(in_flight.failures)
        in_flight.failures.clear()
        raise_first(untold)


def _finished(running: _bindings.OpByOpRun, request: Request) -> list[Step]:
    """Finishes such a graph; gives what is left of it."""
    try:
        obstacle = op_by_op.finish(running)
    except Exception as error:
        if running.interrupted:
            raise
        _raise_interrupt()
        return _apart(error, running.graph, request)
    if obstacle is None:
        return []
    if isinstance(obstacle, StaticNumbers):
        numbers.specialize(obstacle)
    running.graph.clear()
    request.cut.retry = True
    return [Step(request.cut, Way.PROGRAM, ahead=False)]


def finish_all(wait: bool = False) -> None:
    """Likewise on all devices, where nobody can be told: what fails is raised by the next barrier or read.

    With `wait` programs are waited for too.
    """
    for device in range(_bindings.device_count()):
        for end in (finish, executor.wait) if wait else (finish,):
            try:
                end(device)
            except Exception as error:
                _bindings.in_flight(device).failures.append(error)


def _end() -> None:
    """Waits for what runs, and tells what failed and was not raised: the process then ends with code 1."""
    finish_all(wait=True)
    for device in range(_bindings.device_count()):
        for failure in _bindings.in_flight(device).failures:
            sys.excepthook(type(failure), failure, failure.__traceback__)
            _bindings.exit_with_failure()


client.at_exit(_end)


def _attempt(step: Step, request: Request) -> list[Step]:
    """Runs a graph; gives what is to be tried next, in order: its plan, the rest of one that failed, or it again."""
    cut = step.graph
    watched = _watched()
    try:
        if cut is None:
            try:
                with _events.span("cut") if watched else _events.NOTHING:
                    cut = step.cut.graph()
            except RuntimeError:
                if request.failures:
                    return []  # it needs what was lost
                raise
            if cut.has_fills and not (client.spmd() and cut.num_outputs):  # there the program says how they are split
                fills.provide(cut)
        outputs = cut.num_outputs
        if not outputs:
            return []
        if step.way is Way.PLANNED:
            if watched:  # a region does not see its graph's parts
                request.name = region.before_run(cut.key, _bindings.user_frame, lambda: graph.describe(cut))
            steps = plan.steps(request, cut)
            if steps[0].graph is not cut:
                return steps
            (step,) = steps
        if step.way is Way.HOST and (cut.fits_host or cut.fits_host_partition) and _run_on_host(cut, request):
            return []
        # The steady state of a loop: nothing else of it is Python code from here to the results.
        ran_cached = not (watched or cut.has_fills) and cache.run(cut)
        if not ran_cached and not _run_by_stages(cut, request, step.ahead and not watched):
            step.cut.retry = True
            cut.clear()
            return [replace(step, graph=None)]
        if request.reading and step.cut is request.cut:
            loop_report.value_read(outputs, cut.device)
        return []
    except _bindings.StaleGraph:
        return [replace(step, graph=None)]
    except GraphLimitError:  # before anything ran: the graph stays pending
        raise
    except ExecutionError as late:  # so it does here, without what needs the lost values
        request.failures.append(late)
        if cut is not None:
            cut.clear()  # the error holds it
        return [replace(step, graph=None)]
    except Exception as error:
        _raise_interrupt()
        if cut is None or not client.client_started() or interruptible.is_foreign(error):
            raise  # it says why there is no device, say, and is no graph's failure: that stays pending
        return _apart(error, cut, request)


def compute_on_host(what: _bindings.Cut) -> bool:
    """Computes a graph behind a read with PyTorch's CPU kernels, if it is very small and has no collective.

    It stays pending where this is False.
    """
    finish(what.device)
    cut = what.graph()
    try:
        alone = bool(cut.num_outputs) and cut.fits_host and not region.stack()
        return alone and _run_on_host(cut, Request(what, debug_level.READ, reading=True))
    finally:
        cut.clear()  # it holds what others may write over, also where a kernel raised


def reads_directly(device: int) -> bool:
    """Whether small values are read without these stages: nobody looks at them, and kernels read a device's memory."""
    return (
        client.client_started()
        and op_by_op.on()
        and not (_watched() or lowering.inside() or client.spmd())
        and placement.of(device).on_host
    )


def _run_on_host(cut: _bindings.Graph, request: Request) -> bool:
    if not op_by_op.on() or cut.has_fills or op_by_op.run(cut, request) is not None:
        return False
    _metrics.count("HostCompute")
    return True


def _apart(error: Exception, cut: _bindings.Graph, request: Request) -> list[Step]:
    """Takes notice of a graph's failure; gives what is left of it."""
    failure, parts = failures.of_graph(error, cut, request.name)
    if failure is not None:
        request.failures.append(failure)
    return [Step(part, Way.PROGRAM, ahead=False) for part in parts]


def _raise_interrupt() -> None:
    interrupt = fallback.take_interrupt()
    if interrupt is not None:
        try:
            raise interrupt
        finally:
            del interrupt


def _watched() -> bool:
    """Whether somebody looks at the stages of each run, or has a say in it."""
    return bool(_events.sinks or region.stack()) or inspected()


def inspected() -> bool:
    """Whether somebody wants to see each program with its graph before it runs, or may forbid it."""
    return bool(not region.allowed or dispatch.disturbed()) or _WATCHING.any_set()


def _run_by_stages(cut: _bindings.Graph, request: Request, ahead: bool) -> bool:
    """Runs a graph; False where more is known of its numbers than when it was cut, so that it is to be cut again.

    With `ahead` the host may record on while it runs operator by operator.
    """
    checks_values = _config.XLA_CHECK_VALUES.get()  # which no program does
    with _events.span("look up"):
        executable = None if checks_values else cache.find(cut)
    new = executable is None
    if executable is None:
        if cut.constants_vary():
            return False
        executable = cache.find(cut)
    if checks_values or (executable is None and _runs_without(cut)):
        if not checks_values:
            hotness.note(cut)
        if cut.has_fills:
            fills.provide(cut)
        obstacle = _run_uncompiled(cut, request, ahead)
        if isinstance(obstacle, StaticNumbers):
            numbers.specialize(obstacle)
            return False
        if obstacle is None:
            _metrics.count("CheckedRun" if checks_values else "UncompiledRun")
            return True
    if executable is None:
        outcome = _by_host.get(hotness.key_of(cut)) or _first_use(cut, request)
        if isinstance(outcome, StaticNumbers):
            numbers.specialize(outcome)
            return False
        if isinstance(outcome, fallback.NeedsHost):
            _run_by_host(cut, outcome, request)
            return True
        executable = outcome
    if cut.has_fills:
        fills.provide(cut, executable.program.input_placements)
    if new and client.spmd():
        same_program.compare(cut)
    memory_stats.before_run(executable.loaded, cut, request.name)
    debug_level.before_run(cut, request.cause, request.name)
    split_check.before_run(cut)
    executor.run(executable, cut)
    return True


def captured(what: _bindings.Cut, compiles: bool) -> tuple[_bindings.Graph, compiler.Executable | None]:
    """Cuts a graph that is captured; gives it, and its program where that is wanted now. Nothing ran.

    Else it is only lowered, after which it is not cut again.
    """

    def attempt() -> tuple[_bindings.Graph, compiler.Executable | None]:
        cut = what.graph()
        what.retry = True
        executable = cache.find(cut) if cut.num_outputs else None
        while cut.num_outputs and executable is None and cut.constants_vary():
            cut = what.graph()
            executable = cache.find(cut)
        if cut.num_outputs and executable is None:
            if compiles:
                executable = program_of(cut)
            else:
                compiler.lower(graph.describe(cut), "graph")
        return cut, executable

    return numbers.settled(attempt)


def program_of(cut: _bindings.Graph) -> compiler.Executable:
    """The program of a graph that was captured.

    Raises StaticNumbers where it is to be cut again, RuntimeError where a part of it runs on the host, which no program
    of the device can call.
    """
    executable = cache.find(cut)
    if executable is not None:
        return executable
    request = Request(_bindings.Cut.of_device(cut.device), debug_level.CAPTURE, reading=False, name=region.name())
    outcome = _first_use(cut, request)
    if isinstance(outcome, StaticNumbers):
        raise outcome
    if isinstance(outcome, fallback.NeedsHost):
        problem = f"got {outcome.op}, which runs on the host ({outcome.reason}),"
        raise RuntimeError(message("graph", problem, do="leave it out of the capture"))
    if client.spmd():
        same_program.compare(cut)
    return outcome


def _runs_without(cut: _bindings.Graph) -> bool:
    """Whether a graph that has no program runs operator by operator, and is not compiled."""
    return not inspected() and hotness.counts(cut.device) and not hotness.is_due(cut)


def _run_uncompiled(cut: _bindings.Graph, request: Request, ahead: bool) -> op_by_op.Obstacle | None:
    """Runs a graph operator by operator, while the host records on where `ahead` says so."""
    if not ahead or request.reading or cut.fits_host:
        return op_by_op.run(cut, request)
    running = op_by_op.begin(cut, request)
    if running is None:
        return op_by_op.CANNOT_RUN
    return None if running.start() else op_by_op.finish(running)


def _run_by_host(cut: _bindings.Graph, needed: fallback.NeedsHost, request: Request) -> None:
    """Runs a graph operator by operator that no program computes: a part of it wants the host, which none can call.

    Operators without any lowering are no part of a graph there (`Hooks.needs_host`). Others show it late: by a
    decomposition that ends in one, arguments that a rule does not take, or functions of JAX's. Raises RuntimeError
    where operators cannot be run for themselves there either.
    """
    if cut.has_fills:
        fills.provide(cut)
    key = hotness.key_of(cut)
    if session.connected() is not None or op_by_op.run(cut, request) is not None:
        problem = f"got {needed.op}, which runs on the host ({needed.reason})"
        where = f"what programs of {client.device_type()} compute, which cannot call the host"
        failure: Any = RuntimeError(message("run", problem, expected=where, do="compute it with .cpu()"))
        failure.nodes = () if needed.node is None else lowering.alike(graph.describe(cut), needed.node)
        raise failure from None
    _metrics.count("HostGraph")
    _fallbacks.between_graphs(needed.op, f"{needed.reason}, and all of its graph with it", _bindings.user_frame())
    if len(_by_host) >= _REMEMBERED:
        _by_host.clear()
    _by_host[key] = fallback.NeedsHost(needed.op, needed.reason)  # without the frames that this one holds


# None where it is to be cut again.
Compiled = compiler.Executable | StaticNumbers | fallback.NeedsHost


def _first_use(cut: _bindings.Graph, request: Request) -> Compiled:
    """A program that this process has not run yet, from the disk or compiled, or what stands in the way of one."""
    with lowering.uncollected():
        described = rolling.decide(cut)
    # Where programs span the job the first one makes the connection.
    if session.connected() is None and not (session.rank_info().world > 1 and client.spans_job()):
        return cache.load(cut) or _compile(cut, described, request)
    described = described or graph.describe(cut)
    agreement.prepare(described)
    outcome = cache.load(cut) or _compile(cut, described, request)
    if isinstance(outcome, compiler.Executable):
        program_starts.announce(outcome.program, described)
    return outcome


def _compile(cut: _bindings.Graph, described: graph.Graph | None, request: Request) -> Compiled:
    with lowering.uncollected():
        described = described or graph.describe(cut)
    if _config.XLA_VERIFY_GRAPHS.get():
        verify.verify(described)
    _dump(described)
    name = request.name or "graph"
    try:
        lowered = interruptible.call(functools.partial(compiler.lower, described, name), f"lowering {name}")
    except (StaticNumbers, fallback.NeedsHost) as obstacle:
        return obstacle
    recompiles.note(described, _bindings.user_frame(), request.name, hotness.knows(cut))
    debug_level.before_compile(described, request.cause, request.name)
    try:
        executable = compiler.compile_lowered(cut, lowered, name)
    except fallback.NeedsHost as needed:
        return needed
    debug_level.after_compile(executable)
    cache.add(cut, executable)
    return executable


def _dump(described: graph.Graph) -> None:
    path = _config.XLA_SAVE_TENSORS_FILE.get()
    if path is not None:
        text = render.render(described, _config.XLA_SAVE_TENSORS_FMT.get())
        _files.append("graph", "XLA_SAVE_TENSORS_FILE", session.own_file(path), text)
