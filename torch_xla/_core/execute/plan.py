"""What a barrier or a read comes to: which graphs, one after the other, and in which way each runs."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import torch

from torch_xla import _bindings
from torch_xla._core.compile import cache
from torch_xla._core.device import client
from torch_xla._core.execute import fills, hotness, op_by_op, region


class Way(enum.Enum):
    """How a graph runs.

    PLANNED is as `steps` says of it; HOST with PyTorch's CPU kernels, now, where it is small enough, else as a PROGRAM;
    PROGRAM by its program, without one operator by operator, until `hotness` says that it is compiled.
    """

    PLANNED = enum.auto()
    HOST = enum.auto()
    PROGRAM = enum.auto()


@dataclass(slots=True)
class Request:
    """What is asked for, and what came of it so far."""

    cut: _bindings.Cut  # what its graph is to be made of
    cause: str  # what asks for it, as the analyses print it
    reading: bool  # its values go to the host next, so a very small graph is computed there
    name: str | None = None  # what its graph is called, in a region
    failures: list[Exception] = field(default_factory=list)  # what to raise once all that can run has been started


@dataclass(slots=True)
class Step:
    """A graph to run."""

    cut: _bindings.Cut  # what it is to be made of
    way: Way
    graph: _bindings.Graph | None = None  # where it was cut already
    ahead: bool = True  # whether the host may record on while it runs operator by operator


def steps(request: Request, graph: _bindings.Graph) -> list[Step]:
    """What to run for a request, of its graph, which is empty afterwards where something else runs first.

    For a barrier that is its graph. Where a value is read a read should cost a read: a very small graph runs on the
    host, and in the place of a new one comes a graph that has a program, or one whose growing parts run on the host.
    Where algorithms are to be deterministic it is its own graph too: what runs must not depend on what ran before.
    """
    pending_cut = request.cut
    if not request.reading:
        return [Step(pending_cut, Way.PROGRAM, graph)]
    if op_by_op.on() and graph.fits_host and not graph.has_fills:
        return [Step(pending_cut, Way.HOST, graph)]
    if region.stack() or torch.are_deterministic_algorithms_enabled() or knows(graph):
        return [Step(pending_cut, Way.PROGRAM, graph)]
    graph.clear()  # it holds what others may write over
    pending_cut.retry = True
    other = _instead(pending_cut)
    if other is not None:
        return [Step(other, Way.PROGRAM, ahead=False)]
    if client.spmd():
        return [Step(pending_cut, Way.PROGRAM)]
    graph = pending_cut.graph()
    parts = op_by_op.divide(graph, pending_cut)
    if not parts:
        return [Step(pending_cut, Way.PROGRAM, graph)]
    graph.clear()
    return [Step(part, Way.HOST, ahead=False) for part in (*parts, pending_cut)]


def _instead(what: _bindings.Cut) -> _bindings.Cut | None:
    """What to run where a value is read and the graph for it would be a new one, or None.

    All that is pending, where that is a graph that is known: the loop's body mostly, which ends here. Or the value
    alone, where such a graph is about to come: what the value needs is computed twice in this step, and no part of the
    body gets a graph of its own. After the end of a loop without barriers again all that is pending: other values are
    read next.
    """
    full_cut = _bindings.Cut.of_device(what.device)
    has_program = is_known(full_cut)
    if has_program:
        return full_cut
    value_cut = what.roots_only()
    if value_cut is not None and _bindings.expects_whole_step(what.device):
        return value_cut
    return full_cut if has_program is not None and _bindings.was_cut(what.device) else None


def knows(graph: _bindings.Graph) -> bool:
    """Whether a graph is no new one: it has a program, or ran without."""
    return cache.knows(graph) or (hotness.counts(graph.device) and hotness.knows(graph))


def is_known(what: _bindings.Cut) -> bool | None:
    """Whether a graph has a program in memory, or ran without; None where nothing is to be computed. It stays pending.

    Nothing else runs on its device.
    """
    graph = what.graph()
    if not graph.num_outputs:
        return None
    if graph.has_fills:
        fills.provide(graph)
    has_program = knows(graph)
    graph.clear()
    return has_program
