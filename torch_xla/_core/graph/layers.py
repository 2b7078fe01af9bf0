"""Layers: segments of a graph that do the same, each with what the one before gave and with weights of its own.

They are found in the nodes' order: the same calls on the same types again and again, one period apart, and wired alike.
A model's layers are such a run, and their backward passes are another, which takes what the layers saved in reverse
order. Nothing is guessed: a run has been compared node by node and wire by wire.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torch_xla._core.graph import sequence
from torch_xla._core.graph.graph import Carried, Graph, Inside, Layers, Node, Source, Wire
from torch_xla.ops.registry import Meta

_PERIODS = 32  # tried at most
_COVERED = 0.3  # of a period's nodes that must have been seen a period before
_MOST_INPUTS = 16  # of a node in a layer


@dataclass(frozen=True, slots=True)
class _Found:
    """A run by its place among the nodes."""

    base: int
    period: int
    count: int
    carried: int  # bytes from one layer to the next

    @property
    def end(self) -> int:
        return self.base + self.period * self.count

    @property
    def saved(self) -> int:
        return (self.count - 1) * self.period


def find(graph: Graph, least: int, excluded: Container[int] = ()) -> tuple[Layers, ...]:
    """The runs of at least so many layers of a graph, in its order; excluded nodes are in no layer."""
    if len(graph.nodes) < 2 * least:
        return ()
    search = _PeriodSearch(graph, least, excluded)
    return tuple(search.layers(run) for run in search.runs())


class _PeriodSearch:
    def __init__(self, graph: Graph, least: int, excluded: Container[int]) -> None:
        self._graph, self._least = graph, least
        inside = [slot not in excluded and _may_repeat(node) for slot, node in enumerate(graph.nodes)]
        self._kinds = self._number_kinds(inside)
        width = max((len(node.inputs) for node, ok in zip(graph.nodes, inside, strict=True) if ok), default=1)
        self._sources = np.full((len(graph.nodes), width), -1, np.int64)
        self._results = np.zeros((len(graph.nodes), width), np.int64)
        for slot, (node, ok) in enumerate(zip(graph.nodes, inside, strict=True)):
            for j, wire in enumerate(node.inputs if ok else ()):
                self._results[slot, j] = wire.result
                if not wire.leaf:
                    self._sources[slot, j] = wire.slot

    def _number_kinds(self, inside: Sequence[bool]) -> Any:
        """Per node a number, equal for those that do the same on inputs of the same types."""
        kind_numbers: dict[Any, int] = {}
        kinds = []
        for slot, (node, ok) in enumerate(zip(self._graph.nodes, inside, strict=True)):
            kind = slot if not ok else (node.call, tuple(map(self._meta, node.inputs)), node.outs, node.seeded)
            kinds.append(kind_numbers.setdefault(kind, len(kind_numbers)))
        return np.array(kinds, np.int64)

    def _meta(self, wire: Wire) -> Meta | None:
        graph = self._graph
        return graph.leaves[wire.slot] if wire.leaf else graph.nodes[wire.slot].outs[wire.result]

    def runs(self) -> list[_Found]:
        """Runs that do not overlap, in order; of several that do, the one that saves most nodes."""
        candidates: list[_Found] = []
        for period in self._periods():
            equal = (self._kinds[:-period] == self._kinds[period:]).astype(np.int8)
            edges = np.flatnonzero(np.diff(equal, prepend=0, append=0)).reshape(-1, 2)
            for start, end in edges[edges[:, 1] - edges[:, 0] >= (self._least - 1) * period].tolist():
                is_covered = any(f.base <= start and end <= f.end and period % f.period == 0 for f in candidates)
                if not is_covered:
                    candidates += self._within(start, end + period, period)
        candidates.sort(key=lambda f: (-f.saved, f.period))
        chosen: list[_Found] = []
        for run in candidates:
            if all(run.end <= other.base or other.end <= run.base for other in chosen) and self._pays(run):
                chosen.append(run)
        return sorted(chosen, key=lambda f: f.base)

    def _periods(self) -> list[int]:
        """Distances at which pairs of calls come again most often, the shortest first."""
        kinds = self._kinds.tolist()
        latest: dict[tuple[int, int], int] = {}
        distances: Counter[int] = Counter()
        for k, pair in enumerate(zip(kinds, kinds[1:], strict=False)):
            if pair in latest:
                distances[k - latest[pair]] += 1
            latest[pair] = k
        least = self._least - 1
        often = [d for d, n in distances.most_common(_PERIODS) if d > 1 and n >= _COVERED * d * least]
        return sorted(d for d in often if d * (least + 1) <= len(kinds))

    def _within(self, start: int, end: int, period: int) -> list[_Found]:
        """Runs within a stretch whose calls repeat: where wires do not, one ends and the next begins."""
        candidates = []
        while end - start >= self._least * period:
            last = min(start + 2 * period, end - self._least * period)  # a first layer may have other wires
            tried = [self._run(base, period, (end - base) // period) for base in range(start, last + 1)]
            runs = [run for run in tried if run.count >= self._least]
            if not runs:
                start = last + 1
                continue
            best = max(runs, key=lambda run: (run.saved, -run.carried))
            candidates.append(best)
            start = best.end
        return candidates

    def _wiring(self, base: int, period: int, count: int) -> Any:
        """Per layer and input a number: of the result of this layer or the one before that it is, or for another."""
        end = base + period * count
        sources = self._sources[base:end].reshape(count, -1)
        results = self._results[base:end].reshape(count, -1)
        relative = sources - (base + period * np.arange(count)[:, None])
        wiring = relative * 1024 + np.minimum(results, 1023)
        wiring[relative < -period] = _FAR - 1  # of a layer further back
        wiring[sources < base] = _FAR
        return wiring

    def _run(self, base: int, period: int, count: int) -> _Found:
        """The longest run from here."""
        wiring = self._wiring(base, period, count)
        second = wiring[1]
        same = (wiring == second).all(axis=1) & (second != _FAR - 1).all()
        same[0] = (wiring[0] == np.where(second >= 0, second, _FAR)).all()
        count = count if same.all() else int(same.argmin())
        carried = np.unique(second[(second < 0) & (second > _FAR)])
        size = sum(self._bytes(base + period + (code >> 10), code & 1023) for code in carried.tolist())
        return _Found(base, period, count, size)

    def _bytes(self, place: int, result: int) -> int:
        meta = self._graph.nodes[place].outs[result]
        return 0 if meta is None else math.prod(meta.shape) * meta.dtype.itemsize

    def _pays(self, run: _Found) -> bool:
        """Whether a layer has more than constants and elementwise operators: an optimizer's are computed on packs."""
        nodes = self._graph.nodes[run.base : run.base + run.period]
        return any(node.inputs and not elementwise(node.op) for node in nodes)

    def layers(self, found: _Found) -> Layers:
        """A run with where its inputs come from."""
        base, period, count = found.base, found.period, found.count
        slots = tuple(range(base, found.end))
        second = self._wiring(base, period, count)[1].reshape(period, -1).tolist()
        sources = []
        for offset, codes in enumerate(second):
            columns = zip(*(self._graph.nodes[slot].inputs for slot in slots[offset::period]), strict=True)
            node_sources: list[Source] = []
            for code, wires in zip(codes, columns, strict=False):
                if code >= 0:
                    node_sources.append(Inside(code >> 10, code & 1023))
                elif code != _FAR:
                    node_sources.append(Carried((code >> 10) + period, code & 1023, wires[0]))
                else:
                    node_sources.append(wires[0] if len(set(wires)) == 1 else wires)
            sources.append(tuple(node_sources))
        return Layers(slots, period, tuple(sources))


_FAR = -(1 << 62)


def _may_repeat(node: Node) -> bool:
    # Without a hash of its constants it cannot be compared, and collectives are numbered one by one.
    few = len(node.inputs) <= _MOST_INPUTS and len(node.outs) < 1024
    return node.attrs is not None and few and not sequence.is_collective(node)


@functools.cache
def elementwise(op: str) -> bool:
    """Whether an operator computes each element of its result from the same one of its operands."""
    from torch_xla.ops.call import find_overload

    return torch.Tag.pointwise in find_overload(op).tags
