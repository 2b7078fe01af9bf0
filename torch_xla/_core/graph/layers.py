"""Finds layers: segments of a graph that are equal but for their weights, each with the results of the one before.

The nodes of a model of four blocks, `a b c  a b c  a b c  a b c`, are one run with period 3 and count 4. Runs are found
in the order of the nodes: the same calls on the same types, one period apart, with the same edges between them.
A model's layers are such a run, and their backward passes are another, which takes what the layers saved in reverse
order. Nothing is guessed: a run has been compared node by node and edge by edge.
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
from torch_xla._core.graph.graph import Carried, Graph, Inside, Layers, Node, Source

_PERIODS = 32  # tried at most
_COVERED = 0.3  # of a period's nodes that must have been seen a period before
_MOST_INPUTS = 16  # of a node in a layer


@dataclass(frozen=True, slots=True)
class _Run:
    """A run by its position among the nodes."""

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
            for j, edge in enumerate(node.inputs if ok else ()):
                self._results[slot, j] = edge.result
                if not edge.leaf:
                    self._sources[slot, j] = edge.slot

    def _number_kinds(self, inside: Sequence[bool]) -> Any:
        """Per node a number, equal for those that do the same on inputs of the same types."""
        kind_numbers: dict[Any, int] = {}
        kinds = []
        for slot, (node, ok) in enumerate(zip(self._graph.nodes, inside, strict=True)):
            kind = slot if not ok else (node.call, tuple(map(self._graph.meta, node.inputs)), node.outs, node.seeded)
            kinds.append(kind_numbers.setdefault(kind, len(kind_numbers)))
        return np.array(kinds, np.int64)

    def runs(self) -> list[_Run]:
        """Runs that do not overlap, in order; of several that do, the one that saves most nodes."""
        candidates: list[_Run] = []
        for period in self._periods():
            equal = (self._kinds[:-period] == self._kinds[period:]).astype(np.int8)
            bounds = np.flatnonzero(np.diff(equal, prepend=0, append=0)).reshape(-1, 2)
            for start, end in bounds[bounds[:, 1] - bounds[:, 0] >= (self._least - 1) * period].tolist():
                is_covered = any(f.base <= start and end <= f.end and period % f.period == 0 for f in candidates)
                if not is_covered:
                    candidates += self._within(start, end + period, period)
        candidates.sort(key=lambda f: (-f.saved, f.period))
        chosen: list[_Run] = []
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

    def _within(self, start: int, end: int, period: int) -> list[_Run]:
        """Runs within a span whose calls repeat: where its edges do not, one run ends and the next begins."""
        candidates = []
        while end - start >= self._least * period:
            last = min(start + 2 * period, end - self._least * period)  # a first layer may have other edges
            candidates_here = [self._run(base, period, (end - base) // period) for base in range(start, last + 1)]
            runs = [run for run in candidates_here if run.count >= self._least]
            if not runs:
                start = last + 1
                continue
            best = max(runs, key=lambda run: (run.saved, -run.carried))
            candidates.append(best)
            start = best.end
        return candidates

    def _edge_codes(self, base: int, period: int, count: int) -> Any:
        """Per layer and input a number: of the result of this layer or the one before that it is, or for another."""
        end = base + period * count
        sources = self._sources[base:end].reshape(count, -1)
        results = self._results[base:end].reshape(count, -1)
        relative = sources - (base + period * np.arange(count)[:, None])
        codes = relative * 1024 + np.minimum(results, 1023)
        codes[relative < -period] = _FAR - 1  # of a layer further back
        codes[sources < base] = _FAR
        return codes

    def _run(self, base: int, period: int, count: int) -> _Run:
        """The longest run from here."""
        codes = self._edge_codes(base, period, count)
        second = codes[1]
        same = (codes == second).all(axis=1) & (second != _FAR - 1).all()
        same[0] = (codes[0] == np.where(second >= 0, second, _FAR)).all()
        count = count if same.all() else int(same.argmin())
        carried = np.unique(second[(second < 0) & (second > _FAR)])
        size = sum(self._bytes(base + period + (code >> 10), code & 1023) for code in carried.tolist())
        return _Run(base, period, count, size)

    def _bytes(self, slot: int, result: int) -> int:
        meta = self._graph.nodes[slot].outs[result]
        return 0 if meta is None else math.prod(meta.shape) * meta.dtype.itemsize

    def _pays(self, run: _Run) -> bool:
        """Whether a layer has more than constants and elementwise operators: an optimizer's are computed on packs."""
        nodes = self._graph.nodes[run.base : run.base + run.period]
        return any(node.inputs and not elementwise(node.op) for node in nodes)

    def layers(self, run: _Run) -> Layers:
        """A run with where its inputs come from."""
        base, period, count = run.base, run.period, run.count
        slots = tuple(range(base, run.end))
        second = self._edge_codes(base, period, count)[1].reshape(period, -1).tolist()
        sources = []
        for offset, codes in enumerate(second):
            columns = zip(*(self._graph.nodes[slot].inputs for slot in slots[offset::period]), strict=True)
            node_sources: list[Source] = []
            for code, edges in zip(codes, columns, strict=False):
                if code >= 0:
                    node_sources.append(Inside(code >> 10, code & 1023))
                elif code != _FAR:
                    node_sources.append(Carried((code >> 10) + period, code & 1023, edges[0]))
                else:
                    node_sources.append(edges[0] if len(set(edges)) == 1 else edges)
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
