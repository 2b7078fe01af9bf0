"""Runs all stages for a request: cut → plan → look up → (lower → compile) → run → attach.

`torch_xla.sync()` in a loop: its first step is cut, run op by op and attached; the second is lowered and compiled; from
the third on the program is looked up and run. `plan.py` says which graphs a read needs. What remains of one that failed
is tried again. `_bindings.in_flight(device)` alone has what runs on a device: programs that were started, the graph
that runs op by op in the background, and failures that were not raised yet.
"""

from __future__ import annotations

import functools
import sys

from torch_xla import _bindings, _config, _events, _fallbacks, _files, _metrics
from torch_xla._core.compile import cache, compiler, dispatch, interruptible
from torch_xla._core.device import client, failures, memory_stats, placement
from torch_xla._core.execute import executor, hotness, op_by_op, plan, region, sharding_check
from torch_xla._core.execute.plan import Request, Step, Way
from torch_xla._core.graph import verify
from torch_xla._core.graph.graph import Graph, describe
from torch_xla._core.job import agreement, program_starts, same_program, session
from torch_xla._core.lower import lowering, numbers, rolling
from torch_xla._core.report import debug_level, loop_report, recompiles, render
from torch_xla._errors import ExecutionError, GraphFailure, GraphLimitError, OptionsError, message, raise_first
from torch_xla.ops import fallback
from torch_xla.ops.registry import StaticNumbers

Compiled = compiler.Executable | fallback.NeedsHost
_REMEMBERED = 1 << 14
_uncompilable: dict[tuple[str, int], fallback.NeedsHost] = {}  # graphs that no program computes, and why

# What looks at each program before it runs.
_WATCHING = _config.Watch(
    *memory_stats.ASKED_BY, *debug_level.ASKED_BY, *sharding_check.ASKED_BY, _config.XLA_CHECK_VALUES
)


def run(cut: _bindings.Cut, cause: str, reading: bool) -> None:
    """Cuts a graph and runs it; with `reading` its values go to the host next, so a very small one is computed there.

    Raises GraphLimitError where it may not run here, and stays pending, OutOfMemoryError where it does not fit,
    ExecutionError where a graph that was started earlier failed, and this one has been started all the same, and
    RuntimeError where lowering, compiling or starting failed. There, and where it did not fit, what depends on the
    failed operators has the values of the last barrier again, and the rest has been started.
    """
    lowering.check_not_inside()
    finish(cut.device)
    request = Request(cut, cause, reading)
    _run(request, [Step(cut, Way.UNDECIDED)])


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
        _run(
            running.request, [Step(running.request.cut, Way.PROGRAM, running.graph, background=False, running=running)]
        )
    if in_flight.failures:
        unreported = list(in_flight.failures)
        in_flight.failures.clear()
        raise_first(unreported)


def finish_all(wait: bool = False) -> None:
    """Finishes on all devices, where nothing can be raised: failures are raised by the next barrier or read.

    With `wait` programs are waited for too.
    """
    for device in range(_bindings.device_count()):
        for end in (finish, executor.wait) if wait else (finish,):
            try:
                end(device)
            except Exception as error:
                _bindings.in_flight(device).failures.append(error)


def _end() -> None:
    """Waits for what runs, and prints failures that were not raised: the process then ends with code 1."""
    finish_all(wait=True)
    for device in range(_bindings.device_count()):
        for failure in _bindings.in_flight(device).failures:
            sys.excepthook(type(failure), failure, failure.__traceback__)
            _bindings.exit_with_failure()


client.at_exit(_end)


def _attempt(step: Step, request: Request) -> list[Step]:
    """Runs a graph; returns the steps to try next: its plan, what remains of a failed one, or the same again."""
    if step.graph is None and request.failures and step.cut.is_lost:
        return []
    try:
        return _advance(step, request)
    except StaticNumbers as static:
        assert step.graph is not None  # lowering found out
        numbers.specialize(static, step.graph)
        step.running = None
        return [step]
    except _bindings.StaleGraph:
        if step.running is None:
            finish(request.cut.device)  # what made it stale may run on
        return [step.again()]
    except ExecutionError as late:  # of an earlier graph: this one runs without what needs the lost values
        request.failures.append(late)
        return [step.again()]
    except Exception as error:
        _raise_interrupt()
        if step.graph is None or not _failed(step.graph, error):
            raise
        return _remaining(error if isinstance(error, GraphFailure) else GraphFailure(error), step.graph, request)


def _failed(graph: _bindings.Graph, error: Exception) -> bool:
    """Whether an error is a failure of a graph, which else stays pending, or has run.

    It is none that there is no device, that a region or the user's options forbid the graph, or what a signal handler
    raised meanwhile.
    """
    if isinstance(error, (GraphFailure, GraphLimitError, OptionsError)) or interruptible.is_foreign(error):
        return isinstance(error, GraphFailure)
    running = _bindings.in_flight(graph.device).operator_run
    return client.client_started() and bool(graph.num_nodes) and not (running is not None and running.interrupted)


def _remaining(failure: GraphFailure, graph: _bindings.Graph, request: Request) -> list[Step]:
    """Notes a graph's failure; returns the steps that remain of it."""
    told, parts = failures.recover(graph, failure, request.name)
    if told is not None:
        request.failures.append(told)
    return [Step(part, Way.PROGRAM, background=False) for part in parts]


def _advance(step: Step, request: Request) -> list[Step]:
    # As `_attempt`; no more steps where it ran, or runs in the background, or there was nothing to run.
    if step.running is not None:
        return [] if op_by_op.finish(step.running) else [step.again()]
    observed = _is_observed()
    if step.graph is None:
        with _events.span("cut") if observed else _events.NOTHING:
            step.graph = step.cut.graph()
    graph = step.graph
    outputs = graph.num_outputs
    if not outputs:
        graph.end_empty()
        return []
    if step.way is Way.UNDECIDED:
        if observed:  # a region does not see its graph's parts
            request.name = region.before_run(graph.key, _bindings.user_frame, lambda: describe(graph))
        if request.reading:
            return plan.steps(request, graph)
    if step.way is Way.HOST and (graph.fits_host or graph.fits_host_partition) and _run_on_host(graph, request):
        return []
    # The steady state of a loop: nothing else of it is Python code from here to the results.
    if observed or not cache.run(graph):
        _run_by_stages(graph, request, step.background and not observed)
    if request.reading and step.cut is request.cut:
        loop_report.value_read(outputs, graph.device)
    return []


def compute_on_host(cut: _bindings.Cut) -> bool:
    """Computes a graph behind a read with PyTorch's CPU kernels, if it is very small and has no collective.

    It stays pending where this is False.
    """
    finish(cut.device)
    try:
        graph = cut.graph()
        runs_here = bool(graph.num_outputs) and graph.fits_host and not (graph.has_collectives or region.stack())
        return runs_here and _run_on_host(graph, Request(cut, debug_level.READ, reading=True))
    except (_bindings.StaleGraph, StaticNumbers, GraphFailure):  # it was run, or is told where all that is pending runs
        return False


def reads_directly(device: int) -> bool:
    """Whether small values are read without these stages: nobody looks at them, and kernels read a device's memory."""
    return (
        client.client_started()
        and op_by_op.on()
        and not (_is_observed() or lowering.inside() or client.spmd())
        and placement.of(device).on_host
    )


def _run_on_host(graph: _bindings.Graph, request: Request) -> bool:
    computed = op_by_op.on() and op_by_op.run(graph, request)
    if computed:
        _metrics.count("HostCompute")
    return computed


def _raise_interrupt() -> None:
    interrupt = fallback.take_interrupt()
    if interrupt is not None:
        try:
            raise interrupt
        finally:
            del interrupt


def _is_observed() -> bool:
    """Whether a profile, a region or a limit observes the stages of each run."""
    return bool(_events.sinks or region.stack()) or inspected()


def inspected() -> bool:
    """Whether each program is to be shown, checked or forbidden before it runs."""
    return bool(not region.allowed or dispatch.debug_checks_on()) or _WATCHING.any_set()


def _run_by_stages(graph: _bindings.Graph, request: Request, background: bool) -> None:
    """Runs a graph; with `background` the host may record on while it runs op by op."""
    checks_values = _config.XLA_CHECK_VALUES.get()  # which no program does
    is_new = client.spmd() and not cache.knows(graph)
    with _events.span("look up"):
        executable = None if checks_values else _program_in_memory(graph)
    if checks_values or (executable is None and _runs_op_by_op(graph, request)):
        if not checks_values:
            hotness.note(graph)
        if _run_uncompiled(graph, request, background):
            _metrics.count("CheckedRun" if checks_values else "UncompiledRun")
            return
    if executable is None:
        outcome = _uncompilable.get(hotness.key_of(graph)) or _first_use(graph, request)
        if isinstance(outcome, fallback.NeedsHost):
            _run_without_program(graph, outcome, request)
            return
        executable = outcome
    if client.spmd():
        executable.program.place_fills(graph)
        if is_new:
            same_program.compare(graph)
    memory_stats.before_run(executable.loaded, graph, request.name)
    debug_level.before_run(graph, request.cause, request.name)
    sharding_check.before_run(graph)
    executor.run(executable, graph)


def _program_in_memory(graph: _bindings.Graph) -> compiler.Executable | None:
    """The program of a graph, or of one that differs in constants only."""
    executable = cache.find(graph)
    while executable is None and graph.constants_vary():  # and so has another key
        executable = cache.find(graph)
    return executable or cache.find(graph)  # `constants_vary` may have found another key


def program_of(graph: _bindings.Graph) -> compiler.Executable:
    """The program of a graph that was captured.

    Raises RuntimeError where a part of it runs on the host, which no program of the device can call.
    """
    request = Request(_bindings.Cut.of_device(graph.device), debug_level.CAPTURE, reading=False, name=region.name())

    def attempt() -> compiler.Executable:
        outcome = _program_in_memory(graph) or _first_use(graph, request)
        if isinstance(outcome, fallback.NeedsHost):
            problem = f"got {outcome.op}, which runs on the host ({outcome.reason}),"
            raise RuntimeError(
                message("graph", problem, expected="operators of the device", do="call it outside of the capture")
            )
        if client.spmd():
            outcome.program.place_fills(graph)
            same_program.compare(graph)
        return outcome

    return numbers.with_constants(graph, attempt)


def _runs_op_by_op(graph: _bindings.Graph, request: Request) -> bool:
    """Whether a graph that has no program runs op by op now, instead of being compiled."""
    asked = request.cause == debug_level.DYNAMO  # a backend of torch.compile was named for it
    return not inspected() and hotness.counts(graph.device) and not hotness.is_due(graph, asked)


def _run_uncompiled(graph: _bindings.Graph, request: Request, background: bool) -> bool:
    """Runs a graph op by op, with `background` while the host records on; False where only a program can."""
    if not background or request.reading or graph.fits_host or graph.has_collectives:
        return op_by_op.run(graph, request)
    running = op_by_op.begin(graph, request)
    return running is not None and (running.start() or op_by_op.finish(running))


def _run_without_program(graph: _bindings.Graph, obstacle: fallback.NeedsHost, request: Request) -> None:
    """Runs a graph op by op for which there is no program: an operator needs the host, which programs here cannot call.

    Operators without any lowering are no part of a graph there (`Hooks.needs_host`). Others show it late: by a
    decomposition that ends in one, arguments that a rule does not take, or functions of JAX's. Raises RuntimeError
    where operators cannot be run for themselves there either.
    """
    key = hotness.key_of(graph)
    if session.connected() is not None or not op_by_op.run(graph, request):
        problem = f"got {obstacle.op}, which runs on the host ({obstacle.reason})"
        where = f"what programs of {client.device_type()} compute, which cannot call the host"
        failure = RuntimeError(message("run", problem, expected=where, do="compute it with .cpu()"))
        nodes = () if obstacle.node is None else lowering.like_nodes(describe(graph), obstacle.node)
        raise GraphFailure(failure, nodes)
    _metrics.count("HostGraph")
    _fallbacks.between_graphs(obstacle.op, f"{obstacle.reason}, and all of its graph with it", _bindings.user_frame())
    if len(_uncompilable) >= _REMEMBERED:
        _uncompilable.clear()
    _uncompilable[key] = fallback.NeedsHost(obstacle.op, obstacle.reason)  # without the frames that this one holds


def _first_use(graph: _bindings.Graph, request: Request) -> Compiled:
    """Loads a graph's program from the disk, or compiles it; returns it, or the obstacle."""
    with lowering.gc_paused():
        described = rolling.choose_stacks(graph)
    # Where programs span the job the first one makes the connection.
    if session.connected() is None and not (session.rank_info().world > 1 and client.spans_job()):
        return cache.load(graph) or _compile(graph, described, request)
    described = described or describe(graph)
    agreement.prepare(described)
    outcome = cache.load(graph) or _compile(graph, described, request)
    if isinstance(outcome, compiler.Executable):
        program_starts.announce(outcome.program, described)
    return outcome


def _compile(graph: _bindings.Graph, described: Graph | None, request: Request) -> Compiled:
    with lowering.gc_paused():
        described = described or describe(graph)
    if _config.XLA_VERIFY_GRAPHS.get():
        verify.verify(described)
    if (path := _config.XLA_SAVE_TENSORS_FILE.get()) is not None:
        text = render.render(described, _config.XLA_SAVE_TENSORS_FMT.get())
        _files.append("graph", "XLA_SAVE_TENSORS_FILE", session.own_file(path), text)
    name = request.name or "graph"
    try:
        lowered = interruptible.call(functools.partial(compiler.lower, described, name), f"lowering {name}")
    except fallback.NeedsHost as obstacle:
        return obstacle
    except lowering.LoweringError as error:
        raise GraphFailure(error, lowering.like_nodes(described, error.node)) from None
    recompiles.note(described, _bindings.user_frame(), request.name, hotness.knows(graph))
    debug_level.before_compile(described, request.cause, request.name)
    try:
        executable = compiler.compile_lowered(graph, lowered, name)
    except fallback.NeedsHost as obstacle:
        return obstacle
    debug_level.after_compile(executable)
    cache.add(graph, executable)
    return executable
