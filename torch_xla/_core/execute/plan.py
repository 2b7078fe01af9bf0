"""Plans a barrier or a read: which graphs run, one after the other, and how each does.

`loss.item()` in a step whose graph is known becomes that whole graph, if nothing else is pending; one of a few
operators runs on the host; and one with a growing part becomes that part on the host, then the program of the rest.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import torch

from torch_xla import _bindings
from torch_xla._core.compile import cache
from torch_xla._core.device import client
from torch_xla._core.execute import hotness, op_by_op, region


class Way(enum.Enum):
    """How a graph runs.

    UNDECIDED is as `steps` says of a read, else as PROGRAM; HOST with PyTorch's CPU kernels, now, where it is small
    enough, else as PROGRAM; PROGRAM by its program; if it has none, operator by operator until `hotness` says that it
    is compiled.
    """

    UNDECIDED = enum.auto()
    HOST = enum.auto()
    PROGRAM = enum.auto()


@dataclass(slots=True)
class Request:
    """What a barrier or a read asks for, and its failures so far."""

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
    background: bool = True  # whether the host may record on while it runs operator by operator
    running: _bindings.OpByOpRun | None = None  # where it runs operator by operator already

    def again(self) -> Step:
        """The step with its graph to be cut again."""
        self.graph = self.running = None
        return self


def steps(request: Request, graph: _bindings.Graph) -> list[Step]:
    """The steps of a read, given its graph.

    It should not cost a compile: a very small graph runs on the host; a new graph is replaced by one that has a
    program, or by one whose growing parts run on the host. With deterministic algorithms it runs its own graph, as a
    barrier does: what runs must not depend on what ran before.
    """
    pending_cut = request.cut
    runs_here = hotness.counts(graph.device) if graph.has_collectives else op_by_op.on()
    if runs_here and graph.fits_host:
        return [Step(pending_cut, Way.HOST, graph)]
    runs_whole = region.stack() or torch.are_deterministic_algorithms_enabled() or graph.has_collectives
    if runs_whole or has_run(graph):
        return [Step(pending_cut, Way.PROGRAM, graph)]
    other = _known_graph_instead(pending_cut)
    if other is not None:
        return [other]
    parts = [] if client.spmd() else op_by_op.partition_for_host(graph, pending_cut)
    if not parts:
        return [Step(pending_cut, Way.PROGRAM, graph)]
    return [Step(part, Way.HOST, background=False) for part in (*parts, pending_cut)]  # the device's part is too large


def _known_graph_instead(cut: _bindings.Cut) -> Step | None:
    """What to run instead of a read's own graph, which would be new; None if there is nothing better.

    It is all that is pending if that graph has run before: mostly the loop's body, which ends here. It is the value
    alone if the step is about to become such a graph: what the value needs is then computed twice in this step, and no
    part of the body gets a graph of its own. After a loop without barriers it is all that is pending again.
    """
    full = Step(_bindings.Cut.of_device(cut.device), Way.PROGRAM, background=False)
    full.graph = full.cut.graph()
    if full.graph.num_outputs and has_run(full.graph):
        return full
    value_cut = cut.roots_only()
    if value_cut is not None and _bindings.expects_whole_step(cut.device):
        return Step(value_cut, Way.PROGRAM, background=False)
    return full if full.graph.num_outputs and _bindings.was_cut(cut.device) else None


def has_run(graph: _bindings.Graph) -> bool:
    """Whether a graph has a program, or ran without one."""
    return cache.knows(graph) or (hotness.counts(graph.device) and hotness.knows(graph))


def has_run_before(cut: _bindings.Cut) -> bool | None:
    """Whether the graph of a cut has a program in memory, or ran without; None if it is empty. It stays pending.

    To be called while nothing else runs on its device.
    """
    try:
        graph = cut.question()
        return has_run(graph) if graph.num_outputs else None
    except _bindings.StaleGraph:  # a signal handler has run it
        return False
