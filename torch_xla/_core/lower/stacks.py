"""Stacks: which tensors of a graph travel as one array, because a loop reads or writes one of them per layer.

The weights that one operator reads in all layers are a stack, and so are tensors that are computed alike from the
members of one: an optimizer's moments, gradients, an average of the weights. Stacks in which leaves rest already come
first, so that an evaluation reads the arrays that training left.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch_xla._core.device import shardings
from torch_xla._core.graph.graph import Graph, Layers, Wire, Wires
from torch_xla._core.graph.layers import elementwise
from torch_xla.ops.registry import Meta

Stack = tuple[tuple[int, ...], tuple[int, ...]]  # leaves and outputs, as in `Graph.packs`


def find(graph: Graph, resting: Collection[Sequence[int]]) -> list[Stack]:
    """The stacks of a graph with its runs of layers; `resident_stacks` are leaves whose values are one array now."""
    runs = graph.layers
    if not (runs or resting):
        return []
    search = _StackSearch(graph)
    for leaves in resting:
        search.visit(tuple(Wire(True, leaf, 0) for leaf in leaves))
    columns = {source for run in runs for sources in run.sources for source in sources if isinstance(source, tuple)}
    ordered = sorted(columns, key=lambda column: (-len(column), [(w.leaf, w.slot, w.result) for w in column]))
    for column in ordered:
        search.visit(column)
    for run in runs:
        for offset in range(run.period):
            for result in range(len(graph.nodes[run.slots[offset]].outs)):
                search.visit(tuple(Wire(False, slot, result) for slot in search.forwards(run, offset)))
    return search.found


class _StackSearch:
    def __init__(self, graph: Graph) -> None:
        self.found: list[Stack] = []
        self._graph = graph
        self._looped = {slot for run in graph.layers for slot in run.slots}
        self._after = dict(zip(graph.donated, graph.aliased_outputs, strict=True))
        self._output = {Wire(False, *output): i for i, output in enumerate(graph.outputs)}
        self._replaces = {output for output in graph.aliased_outputs if output >= 0}
        self._leaves: set[int] = set()  # in a stack
        self._outputs: set[int] = set()
        self._order: dict[Wire, int] = {}
        self._visited: set[Wires] = set()
        self._calls: dict[int, tuple[Any, ...]] = {}  # what nodes do
        self._readers: dict[Wire, list[tuple[int, int]]] = defaultdict(list)
        for slot, node in enumerate(graph.nodes):
            if slot not in self._looped and elementwise(node.op) and len(node.outs) == 1:
                for position, wire in enumerate(node.inputs):
                    self._readers[wire].append((slot, position))

    def visit(self, column: Wires) -> None:
        """Makes a stack of a column, if it can be one, and of those that alike operators read or compute with it."""
        waiting = [column]
        while waiting:
            column = waiting.pop()
            if column in self._visited or len({*column}) < len(column):
                continue
            self._visited.add(column)
            if any(self._meta(wire) != self._meta(column[0]) for wire in column):
                continue
            if self._add(column):
                self._order |= {wire: i for i, wire in enumerate(column)}
                waiting += self._successors(column)
            waiting += self._operands(column)
            waiting += self._read_alike(column)

    def forwards(self, run: Layers, offset: int) -> tuple[int, ...]:
        """A run's nodes at an offset, in the order in which its weights are in their stacks."""
        slots = run.slots[offset :: run.period]
        for sources in run.sources:
            for source in sources:
                if isinstance(source, tuple) and source[0] in self._order and source[-1] in self._order:
                    return slots if self._order[source[0]] < self._order[source[-1]] else slots[::-1]
        return slots

    def _meta(self, wire: Wire) -> Meta | None:
        return self._graph.leaves[wire.slot] if wire.leaf else self._graph.nodes[wire.slot].outs[wire.result]

    def _add(self, column: Wires) -> bool:
        meta = self._meta(column[0])
        if meta is None or not math.prod(meta.shape):
            return False
        leaves, outputs = self._as_stack(column)
        is_new = self._leaves.isdisjoint(leaves) and self._outputs.isdisjoint(outputs)
        if not (leaves or outputs) or not is_new or not self._are_whole(leaves, outputs):
            return False
        self._leaves.update(leaves)
        self._outputs.update(outputs)
        self.found.append((leaves, outputs))
        return True

    def _as_stack(self, column: Wires) -> Stack:
        """(leaves, outputs): leaves that are read only or all overwritten, or new outputs; both empty if neither."""
        if all(wire.leaf for wire in column):
            leaves = tuple(wire.slot for wire in column)
            after = [self._after.get(leaf) for leaf in leaves]
            outputs = tuple(output for output in after if output is not None and output >= 0)
            if outputs and len({*outputs}) == len(leaves):
                metas = {self._meta(Wire(False, *self._graph.outputs[output])) for output in outputs}
                return (leaves, outputs) if metas == {self._meta(column[0])} else ((), ())
            return (leaves, ()) if after.count(None) == len(leaves) else ((), ())
        outputs = tuple(self._output[wire] for wire in column if wire in self._output)
        return ((), outputs) if len(outputs) == len(column) and self._replaces.isdisjoint(outputs) else ((), ())

    def _are_whole(self, leaves: Iterable[int], outputs: Iterable[int]) -> bool:
        at, to = self._graph.leaf_placements, self._graph.output_placements
        places = [*(at[leaf] for leaf in leaves if at), *(to[output] for output in outputs if to)]
        return all(shardings.same(place, shardings.WHOLE) for place in places)

    def _successors(self, column: Wires) -> list[Wires]:
        outputs = [self._after.get(wire.slot, -1) if wire.leaf else -1 for wire in column]
        return [] if min(outputs) < 0 else [tuple(Wire(False, *self._graph.outputs[output]) for output in outputs)]

    def _operands(self, column: Wires) -> list[Wires]:
        if any(wire.leaf or wire.slot in self._looped for wire in column):
            return []
        slots = [wire.slot for wire in column]
        inputs = (self._graph.nodes[slot].inputs for slot in slots)
        return list(zip(*inputs, strict=True)) if self._are_alike(slots) else []

    def _read_alike(self, column: Wires) -> list[Wires]:
        """What is computed of each member by the same operator."""
        readers = [self._readers.get(wire, []) for wire in column]
        columns = []
        if len({len(wire_readers) for wire_readers in readers}) == 1:
            for places in zip(*readers, strict=True):
                alike = len({position for _, position in places}) == 1
                if alike and self._are_alike([slot for slot, _ in places]):
                    columns.append(tuple(Wire(False, slot, 0) for slot, _ in places))
        return columns

    def _are_alike(self, slots: Sequence[int]) -> bool:
        """Whether nodes are one elementwise operator."""
        if not elementwise(self._graph.nodes[slots[0]].op):
            return False
        for slot in slots:
            if slot not in self._calls:
                node = self._graph.nodes[slot]
                self._calls[slot] = *node.call, len(node.inputs)
        return all(self._calls[slot] == self._calls[slots[0]] for slot in slots)
