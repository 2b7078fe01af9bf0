"""Chooses the stacks of a graph: tensors that are one array, because a loop reads or writes one of them per layer.

The weights that one operator reads in all layers are a stack, and so are tensors that the same operator computes from
its members: an optimizer's moments, gradients, an average of the weights. Arrays that exist already are kept before
others are chosen, so that an evaluation reads those that training left.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch_xla._core.device import shardings
from torch_xla._core.graph.graph import Edge, Edges, Graph, Layers
from torch_xla._core.graph.layers import elementwise

Stack = tuple[tuple[int, ...], tuple[int, ...]]  # leaves and outputs, as in `Graph.packs`


def find(graph: Graph, resident_stacks: Collection[Sequence[int]]) -> list[Stack]:
    """The stacks of a graph with its runs of layers; `resident_stacks` are leaves whose values are one array now."""
    runs = graph.layers
    if not (runs or resident_stacks):
        return []
    search = _StackSearch(graph)
    for leaves in resident_stacks:
        search.visit(tuple(Edge(True, leaf, 0) for leaf in leaves))
    columns = {source for run in runs for sources in run.sources for source in sources if isinstance(source, tuple)}
    ordered = sorted(columns, key=lambda column: (-len(column), [(w.leaf, w.slot, w.result) for w in column]))
    for column in ordered:
        search.visit(column)
    for run in runs:
        for offset in range(run.period):
            for result in range(len(graph.nodes[run.slots[offset]].outs)):
                search.visit(tuple(Edge(False, slot, result) for slot in search.forward_order(run, offset)))
    return search.stacks


class _StackSearch:
    def __init__(self, graph: Graph) -> None:
        self.stacks: list[Stack] = []
        self._graph = graph
        self._in_loops = {slot for run in graph.layers for slot in run.slots}
        self._after = dict(zip(graph.donated, graph.aliased_outputs, strict=True))
        self._output = {Edge(False, *output): i for i, output in enumerate(graph.outputs)}
        self._aliased = {output for output in graph.aliased_outputs if output >= 0}
        self._leaves: set[int] = set()  # in a stack
        self._outputs: set[int] = set()
        self._order: dict[Edge, int] = {}
        self._visited: set[Edges] = set()
        self._calls: dict[int, tuple[Any, ...]] = {}  # what nodes do
        self._readers: dict[Edge, list[tuple[int, int]]] = defaultdict(list)
        for slot, node in enumerate(graph.nodes):
            if slot not in self._in_loops and elementwise(node.op) and len(node.outs) == 1:
                for position, edge in enumerate(node.inputs):
                    self._readers[edge].append((slot, position))

    def visit(self, column: Edges) -> None:
        """Makes a stack of a column, if it can be one, and of those that alike operators read or compute with it."""
        waiting = [column]
        while waiting:
            column = waiting.pop()
            if column in self._visited or len({*column}) < len(column):
                continue
            self._visited.add(column)
            if any(self._graph.meta(edge) != self._graph.meta(column[0]) for edge in column):
                continue
            if self._add(column):
                self._order |= {edge: i for i, edge in enumerate(column)}
                waiting += self._columns_of_outputs(column)
            waiting += self._operands(column)
            waiting += self._columns_of_readers(column)

    def forward_order(self, run: Layers, offset: int) -> tuple[int, ...]:
        """A run's nodes at an offset, in the order in which its weights are in their stacks."""
        slots = run.slots[offset :: run.period]
        for sources in run.sources:
            for source in sources:
                if isinstance(source, tuple) and source[0] in self._order and source[-1] in self._order:
                    return slots if self._order[source[0]] < self._order[source[-1]] else slots[::-1]
        return slots

    def _add(self, column: Edges) -> bool:
        meta = self._graph.meta(column[0])
        if meta is None or not math.prod(meta.shape):
            return False
        leaves, outputs = self._as_stack(column)
        is_new = self._leaves.isdisjoint(leaves) and self._outputs.isdisjoint(outputs)
        if not (leaves or outputs) or not is_new or not self._are_replicated(leaves, outputs):
            return False
        self._leaves.update(leaves)
        self._outputs.update(outputs)
        self.stacks.append((leaves, outputs))
        return True

    def _as_stack(self, column: Edges) -> Stack:
        """(leaves, outputs): leaves that are read only or all overwritten, or new outputs; both empty if neither."""
        if all(edge.leaf for edge in column):
            leaves = tuple(edge.slot for edge in column)
            after = [self._after.get(leaf) for leaf in leaves]
            outputs = tuple(output for output in after if output is not None and output >= 0)
            if outputs and len({*outputs}) == len(leaves):
                metas = {self._graph.meta(Edge(False, *self._graph.outputs[output])) for output in outputs}
                return (leaves, outputs) if metas == {self._graph.meta(column[0])} else ((), ())
            return (leaves, ()) if after.count(None) == len(leaves) else ((), ())
        outputs = tuple(self._output[edge] for edge in column if edge in self._output)
        return ((), outputs) if len(outputs) == len(column) and self._aliased.isdisjoint(outputs) else ((), ())

    def _are_replicated(self, leaves: Iterable[int], outputs: Iterable[int]) -> bool:
        at, to = self._graph.leaf_placements, self._graph.output_placements
        placements = [*(at[leaf] for leaf in leaves if at), *(to[output] for output in outputs if to)]
        return all(shardings.same(place, shardings.REPLICATED) for place in placements)

    def _columns_of_outputs(self, column: Edges) -> list[Edges]:
        outputs = [self._after.get(edge.slot, -1) if edge.leaf else -1 for edge in column]
        return [] if min(outputs) < 0 else [tuple(Edge(False, *self._graph.outputs[output]) for output in outputs)]

    def _operands(self, column: Edges) -> list[Edges]:
        if any(edge.leaf or edge.slot in self._in_loops for edge in column):
            return []
        slots = [edge.slot for edge in column]
        inputs = (self._graph.nodes[slot].inputs for slot in slots)
        return list(zip(*inputs, strict=True)) if self._same_operator(slots) else []

    def _columns_of_readers(self, column: Edges) -> list[Edges]:
        """The columns that one operator computes from a column."""
        readers = [self._readers.get(edge, []) for edge in column]
        columns = []
        if len({len(edge_readers) for edge_readers in readers}) == 1:
            for placements in zip(*readers, strict=True):
                same_position = len({position for _, position in placements}) == 1
                if same_position and self._same_operator([slot for slot, _ in placements]):
                    columns.append(tuple(Edge(False, slot, 0) for slot, _ in placements))
        return columns

    def _same_operator(self, slots: Sequence[int]) -> bool:
        """Whether nodes are one elementwise operator."""
        if not elementwise(self._graph.nodes[slots[0]].op):
            return False
        for slot in slots:
            if slot not in self._calls:
                node = self._graph.nodes[slot]
                self._calls[slot] = *node.call, len(node.inputs)
        return all(self._calls[slot] == self._calls[slots[0]] for slot in slots)
