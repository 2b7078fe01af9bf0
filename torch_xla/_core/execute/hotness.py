"""Decides when a graph is compiled (tier-up): once it repeats. Until then it runs op by op, which costs no compile.

Each line of the user's that asks for graphs counts how many different ones came from it without a program. A graph is
compiled when it has run as often as that, or three times in a row. So the body of a loop is compiled in its second
step, or in its fourth where the first one differed, and where graphs keep changing hardly any is. A rare one, such as a
prompt's before a hundred tokens', has to run more often: its program would save little. One of hundreds of
operators on few values, such as a loop in Python over the elements of a tensor, has to run more often, and one that is
mostly convolutions stays as it is (`worth`). Only counts decide, never time: a program that is run again does the same
again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch_xla import _bindings, _config
from torch_xla._core.compile import cache, options
from torch_xla._core.device import client, placement
from torch_xla._core.execute import op_by_op, region, worth
from torch_xla._core.graph.graph import describe
from torch_xla._core.report import recompiles

_REMEMBERED = 1 << 14
_IN_A_ROW = 3
# Rare is a graph that is long to compile, with less than a 16th of the operators that were recorded since it was new:
# it has to run so many times as often. With less than that of those since its last run, it did not run in a row.
_RARE = 16

_Key = tuple[str, int]


@dataclass(slots=True)
class _Line:
    """A line of the user's, on a device: how many different graphs came from it; the latest, and its runs in a row."""

    graphs: int = 0
    latest: _Key | None = None
    row: int = 0
    recorded: int = 0  # the number of operators recorded when it ran last


@dataclass(slots=True)
class _Graph:
    """How often a graph ran without a program, and the line that it came from first."""

    line: _Line
    since: int  # the number of operators recorded before
    runs: int = 0
    least: float | None = None  # runs before it is compiled, once it repeats


_lines: OrderedDict[tuple[str | None, int], _Line] = OrderedDict()
_graphs: OrderedDict[_Key, _Graph] = OrderedDict()


def counts(device: int) -> bool:
    """Whether a new graph runs operator by operator at first.

    Not where somebody asked for a program (a region, eager mode, which has one for each operator, options of the
    compiler) or looks at each, nor where programs span the processes of a job, which have to agree on them, nor on a
    device that is not this host.
    """
    return (
        _config.XLA_HOST_COMPUTE.get() == "new"
        and op_by_op.on()
        and not (region.stack() or _bindings.is_eager() or options.custom())
        and not (_config.XLA_VERIFY_GRAPHS.get() or _config.XLA_SAVE_TENSORS_FILE.get())
        and not client.spans_job()
        and placement.of(device).on_host
    )


def knows(graph: _bindings.Graph) -> bool:
    """Whether a graph ran here without a program."""
    return key_of(graph) in _graphs


def is_due(graph: _bindings.Graph, asked: bool) -> bool:
    """Whether a graph without a program is to be compiled now: once it repeats, and is worth it or `asked` for."""
    key = key_of(graph)
    entry = _graphs.get(key)
    if entry is None:
        return False
    least = entry.line.graphs * (_RARE if _is_rare(graph, entry.runs, entry.since) else 1)
    repeats = entry.runs >= least or (entry.line.latest == key and entry.line.row >= _IN_A_ROW)
    if repeats and entry.least is None and not asked:
        entry.least = worth.runs_before(describe(graph))
    return repeats and (asked or (entry.least is not None and entry.runs >= entry.least))


def _is_rare(graph: _bindings.Graph, runs: int, since: int) -> bool:
    recorded = _bindings.node_sequence() - since
    return graph.num_nodes > worth.SMALL and runs * graph.num_nodes * _RARE < recorded


def note(graph: _bindings.Graph) -> None:
    """Counts a run without a program that is about to start; GraphLimitError where it is new and that is forbidden."""
    key = key_of(graph)
    entry = _graphs.get(key)
    if entry is None:
        place = _bindings.user_frame(), graph.device
        line = _lines.setdefault(place, _Line())
        recompiles.note_uncompiled(*place, line.graphs + 1, lambda: describe(graph))
        line.graphs += 1
        entry = _graphs[key] = _Graph(line, _bindings.node_sequence())
        _lines.move_to_end(place)
    entry.runs += 1
    line = entry.line
    line.row = line.row + 1 if line.latest == key and not _is_rare(graph, 1, line.recorded) else 1
    line.latest, line.recorded = key, _bindings.node_sequence()
    _graphs.move_to_end(key)
    for table in (_graphs, _lines):
        while len(table) > _REMEMBERED:
            table.popitem(last=False)


def clear() -> None:
    """Forgets all."""
    _graphs.clear()
    _lines.clear()


def key_of(graph: _bindings.Graph) -> _Key:
    """The key of a graph's program."""
    return graph.key, cache.settings_number()
