"""Decides what a failure of a graph takes away, and raises it once: only what depends on it loses its value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch_xla import _bindings
from torch_xla._core.device import memory_stats, placement
from torch_xla._core.graph.graph import CLASSES
from torch_xla._errors import ExecutionError, GraphFailure, JobError, LateJobError, OutOfMemoryError

# Each says what a failure comes from, or nothing.
_explanations: list[Callable[[str], str | None]] = []


def add_explanation(explain: Callable[[str], str | None]) -> None:
    """Registers a function that explains failures of programs: it returns the reason, or None."""
    _explanations.append(explain)


def explained(error: Exception) -> str | None:
    """The reason of a failure, from the registered explanations; None if none has one."""
    return next(filter(None, (explain(str(error)) for explain in _explanations)), None)


def recover(
    graph: _bindings.Graph, failure: GraphFailure, name: str | None
) -> tuple[Exception | None, list[_bindings.Cut]]:
    """Takes a graph apart that failed before its results were attached.

    Gives what to raise, and what is still to be run: everything that does not depend on the failed nodes. Nothing is to
    be raised yet where it is not known which failed: halves of the graph that do not need each other come first. The
    graph is empty afterwards.
    """
    cause, told = failure.cause, failure.cause
    if failure.final:
        pass
    elif (reason := explained(cause)) is not None:
        told = JobError(reason)
    elif not (failure.nodes or graph.unfilled) and (halves := _independent_halves(graph)):
        return None, halves
    elif not isinstance(cause, (JobError, OutOfMemoryError)):
        if memory_stats.ran_out(cause):
            told = memory_stats.explain(cause, graph, name)
        else:
            told = RuntimeError(f"[sync] graph {name or graph.key} failed: {cause}")
        told.__cause__ = cause
    text = f"{told}\n  This tensor had no value before that graph; make it again."
    return told, graph.roll_back(text, failure.nodes)


def _independent_halves(graph: _bindings.Graph) -> list[_bindings.Cut]:
    """Two parts of a graph without an edge between them; none where it is connected."""
    leader = list(range(graph.num_nodes))  # of each node one that it belongs together with, an earlier one or itself

    def find(i: int) -> int:
        while leader[i] != i:
            leader[i] = i = leader[leader[i]]
        return i

    for i, node in enumerate(graph.describe_nodes(CLASSES)):
        for edge in node.inputs:
            if not edge.leaf:
                low, high = sorted((find(edge.slot), find(i)))
                leader[high] = low
    components: dict[int, list[int]] = {}
    for output, (node_slot, _) in enumerate(graph.outputs):
        components.setdefault(find(node_slot), []).append(output)
    parts = [components[first] for first in sorted(components)]
    half = len(parts) // 2
    return [graph.cut_of(sum(some, [])) for some in (parts[:half], parts[half:])] if half else []


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
        failure = late(error, placement.index_of(started) if index is None else index)
    try:
        raise failure
    finally:
        del failure  # it would hold itself, with the caller's variables


def late(error: Exception, device: int) -> ExecutionError:
    """The exception to raise for a program that failed after it was started, from the one that a wait raised.

    What failed with it, or because of it, is found here too and not raised again: its other results, and runs that took
    them. Their tensors have no value from now on.
    """
    others = [run_error for token in _bindings.in_flight(device).take_programs() if (run_error := _error_of(token))]
    failure: ExecutionError
    if (reason := explained(error)) is not None:
        failure = LateJobError(reason)
        others = []  # for the same reason
    elif memory_stats.ran_out(error):
        failure = memory_stats.explain_late(error, device)
    else:
        failure = ExecutionError(f"[run] a graph that was started failed, on xla:{device}: {error}")
    if not isinstance(failure, JobError):
        failure.__cause__ = error
    for other in dict.fromkeys(others):
        if other != str(error):
            failure.add_note(f"[run] another that was started failed too: {other}")
    lost = [buffer for buffer in _bindings.buffers_on(device) if _error_of(buffer)]
    _bindings.lose_buffers(
        device, lost, f"{failure}\n  This tensor's value comes from that graph, and is lost; make it again."
    )
    return failure


def _error_of(started: Any) -> str | None:
    """Waits for a buffer or a token, and says why it failed, if it did."""
    try:
        started.block_until_ready()
    except Exception as error:  # it is told by `late`
        return str(error) or type(error).__name__
    return None
