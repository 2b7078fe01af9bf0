"""Turns a run of equal layers into one loop (`scan_loop.scan`), of which XLA compiles the body once.

Twelve blocks `x = f(x, w0)`, …, `x = f(x, w11)` become `scan(f, x, stack(w0, …, w11))`. An iteration slices its layer's
weights from arrays that hold those of all layers, and stores the results that are read outside of the loop in such
arrays. The loop of the backward pass reads the arrays that the forward loop stored, in reverse order. A result that can
be recomputed elementwise from stored ones is not stored: its readers recompute it, as XLA's fusion does elsewhere.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_xla import _bindings, _config
from torch_xla._core.device import placement
from torch_xla._core.graph import layers
from torch_xla._core.graph.graph import Carried, Edge, Edges, Graph, Inside, Layers, Node, Source, describe
from torch_xla._core.graph.layers import elementwise
from torch_xla._core.lower import manual_lowering, stacks
from torch_xla._core.lower.composites import MARKS
from torch_xla.ops import dtypes
from torch_xla.ops.call import find_overload
from torch_xla.ops.scan_loop import scan

_LEAST = 8  # layers that are worth a loop
_BY_DEFAULT = frozenset({"tpu"})  # where it was measured to pay

Key = tuple[int, int]  # of a value in a layer: the node's offset and its result
NumberIndex = tuple[int, int]  # of a number: vector and index


def least(platform: str, mesh: bool) -> int | None:
    """The fewest layers that become a loop in programs for a platform, or a mesh there; None if none do."""
    setting = _config.XLA_ROLL_LAYERS.get()
    if setting is None:
        setting = int(platform in _BY_DEFAULT and not mesh)  # weights that are split are put together in each run
    return None if setting == 0 else _LEAST if setting == 1 else setting


def mark_layer_loops(graph: Graph, platform: str, mesh: bool) -> Graph:
    """A graph with the runs of layers that become loops in its program: none where it has composites.

    `platform` is JAX's name of the kind of device that it is for; `mesh` says whether it is for a mesh of them.
    """
    fewest = least(platform, mesh)
    if fewest is None or graph.layers or any(node.op in MARKS for node in graph.nodes):
        return graph
    parts = manual_lowering.find(graph)
    excluded = {slot for slot, node in enumerate(graph.nodes) if node.op == manual_lowering.LEAVE or slot in parts}
    return replace(graph, layers=layers.find(graph, fewest, excluded))


def choose_stacks(cut_graph: _bindings.Graph) -> Graph | None:
    """Chooses the loops and the stacks of a graph whose program is about to be compiled, or loaded.

    Sets `cut_graph.stacks`, the tensors that travel as one array. Returns the graph's description with the runs of
    layers that become loops, or None where programs for its device have no loops.
    """
    place = placement.of(cut_graph.device)
    if least(place.platform, place.mesh) is None:
        return None
    graph = mark_layer_loops(describe(cut_graph), place.platform, place.mesh)
    cut_graph.stacks = stacks.find(graph, cut_graph.resident_stacks)
    return replace(describe(cut_graph), layers=graph.layers) if cut_graph.stacks else graph


@dataclass(frozen=True, slots=True)
class Stack:
    """A value of each layer in one array, that of layer `i` at index `start + i * step`."""

    array: Any
    start: int
    step: int

    def __getitem__(self, layer: Any) -> Any:
        index = layer * np.int32(self.step) + np.int32(self.start)
        return jax.lax.dynamic_index_in_dim(self.array, index, keepdims=False, allow_negative_indices=False)


@dataclass(frozen=True, slots=True)
class _Column:
    """Edges that are one result of a run's layers, one step apart."""

    run: Layers
    key: Key
    start: int
    step: int


class LoopPlan:
    """The runs of layers of a graph, and which results of each run are read outside of its loop.

    `live_nodes` are the nodes that are computed; `singles` are the edges that are read other than as their operands.
    """

    def __init__(self, graph: Graph, live_nodes: set[int], singles: set[Edge]) -> None:
        runs, self.graph = graph.layers, graph
        self.owner = {slot: (run, *divmod(i, run.period)) for run in runs for i, slot in enumerate(run.slots)}
        self._first: dict[tuple[Layers, Key], set[Edge]] = defaultdict(set)
        for run in runs:
            for source in _sources(run, Carried):
                self._first[run, (source.offset, source.result)].add(source.first)
        self._layers: dict[tuple[Layers, Key], set[int]] = defaultdict(set)
        self._before: set[tuple[Layers, Carried]] = set()
        in_columns: dict[Layers, set[Key]] = defaultdict(set)
        for run in runs:
            for edges in _sources(run, tuple):
                before, column = self.before(edges), self.column(edges)
                if before is not None:
                    self._before.add(before[:2])
                elif column is not None:
                    in_columns[column.run].add(column.key)
                else:
                    self._note_reads(edges)
            self._note_reads(source.first for source in _sources(run, Carried))
            self._note_reads(_sources(run, Edge))
        for slot in live_nodes - self.owner.keys():
            self._note_reads(graph.nodes[slot].inputs)
        self._note_reads(singles)
        outputs = {(self.owner[w.slot][0], (self.owner[w.slot][2], w.result)) for w in singles if self._is_ours(w)}
        self._recomputed: set[tuple[Layers, Key]] = set()
        for run in runs:
            self._choose_recomputed(run, in_columns[run], {key for of, key in outputs if of is run})

    def _note_reads(self, edges: Iterable[Edge]) -> None:
        for edge in edges:
            if self._is_ours(edge):
                run, layer, offset = self.owner[edge.slot]
                self._layers[run, (offset, edge.result)].add(layer)

    def _is_ours(self, edge: Edge) -> bool:
        return not edge.leaf and edge.slot in self.owner

    def column(self, edges: Edges) -> _Column | None:
        """The column that these edges are, if they are one result of a run's layers, a step apart."""
        if not all(map(self._is_ours, edges)):
            return None
        positions = [(*self.owner[edge.slot], edge.result) for edge in edges]
        run, start, offset, result = positions[0]
        steps = {b[1] - a[1] for a, b in zip(positions, positions[1:], strict=False)}
        if len(steps) != 1 or any((f[0], f[2], f[3]) != (run, offset, result) for f in positions):
            return None
        return _Column(run, (offset, result), start, steps.pop())

    def before(self, edges: Edges) -> tuple[Layers, Carried, bool] | None:
        """The carried value that the layers of a run take as these edges, and whether in reverse; None if none is."""
        for turned in (False, True):
            first, *rest = reversed(edges) if turned else edges
            column = self.column(tuple(rest))
            if column is None or (column.start, column.step) != (0, 1) or len(edges) != column.run.count:
                continue
            if first in self._first[column.run, column.key]:
                return column.run, Carried(*column.key, first), turned
        return None

    def _choose_recomputed(self, run: Layers, keys: set[Key], outputs: set[Key]) -> None:
        """Decides which of a run's results are not stored, because their readers recompute them from stored ones.

        `keys` are the results that other runs read, `outputs` those that the program returns.
        """
        last = {run.count - 1}
        stored_keys = keys | {key for (of, key), indices in self._layers.items() if of is run and indices != last}
        for key in sorted(keys - outputs, reverse=True):
            if self._is_recomputable(run, key, stored_keys - {key}):
                stored_keys.remove(key)
                self._recomputed.add((run, key))
                self._layers.pop((run, key), None)
        for key in keys & stored_keys:
            self._layers[run, key].update(range(run.count))

    def _is_recomputable(self, run: Layers, key: Key, stored: set[Key]) -> bool:
        """Whether a result of a layer is computed cheaply from these, and from what the layer was given."""
        node = self.graph.nodes[run.slots[key[0]]]
        return (
            not node.seeded and cheap(node.op) and all(self._is_available(run, s, stored) for s in run.sources[key[0]])
        )

    def _is_available(self, run: Layers, source: Source, stored: set[Key]) -> bool:
        if isinstance(source, Inside):
            key = source.offset, source.result
            return key in stored or self._is_recomputable(run, key, stored)
        if isinstance(source, Carried):
            return (run, source) in self._before
        column = self.column(source) if isinstance(source, tuple) else None
        return column is None or not self.is_recomputed(column.run, column.key)

    def is_recomputed(self, run: Layers, key: Key) -> bool:
        """Whether a result is computed again by those that read it."""
        return (run, key) in self._recomputed

    def read_outside(self, run: Layers) -> tuple[list[Key], list[Key], list[Carried]]:
        """Results that are wanted of several layers, of the last alone, and carried values that are."""
        several: list[Key] = []
        last: list[Key] = []
        for (of, key), indices in self._layers.items():
            if of is run:
                (last if indices == {run.count - 1} else several).append(key)
        before = [carried for of, carried in self._before if of is run]
        return sorted(several), sorted(last), sorted(before, key=_order)


def common(nodes: Sequence[Node]) -> Node:
    """The first layer's node, for that of all layers: where their module paths differ, its path has a ``*``."""
    paths = [node.scope.split("/") for node in nodes if node.scope]
    if len(paths) < len(nodes) or len({*map(len, paths)}) > 1:
        return nodes[0]
    names = [components[0] if len({*components}) == 1 else "*" for components in zip(*paths, strict=True)]
    return replace(nodes[0], scope="/".join(names))


class Loops:
    """The loops of a program, as planned.

    `number_indices` has for each node where its numbers are in `vectors`. `stacks` maps each leaf that is in a stack to
    the stack's array and the leaf's index there. `place` makes of such an index what is fastest on the platform (see
    `ProgramSignature.index_value`). `value` returns the value of an edge, `apply` the results of a node for given
    tensors, numbers and the words of a seed.
    """

    def __init__(
        self,
        plan: LoopPlan,
        number_indices: Sequence[Sequence[NumberIndex]],
        vectors: Sequence[Any],
        stacks: Mapping[int, tuple[Any, int]],
        place: Callable[[int], Any],
        value: Callable[[Edge], Any],
        apply: Callable[[Node, list[Any], list[Any], Any], tuple[Any, ...]],
    ) -> None:
        self._plan, self._indices, self._vectors = plan, number_indices, vectors
        self._leaves, self._index_value, self._value, self._apply = stacks, place, value, apply
        self._stacked: dict[Edges, Any] = {}
        self._results: dict[tuple[Layers, Key], Stack] = {}  # of all layers
        self._before: dict[tuple[Layers, Carried], Stack] = {}
        self._last: dict[tuple[Layers, Key], Any] = {}
        self._run_inputs: dict[Layers, dict[Any, Any]] = {}  # what a run was given: of all layers, or of each

    def run(self, run: Layers) -> dict[int, _Layer]:
        """Computes a run; gives the results of each of its nodes."""
        columns = _sources(run, tuple)
        aligned = ((edges, self._plan.column(edges)) for edges in columns)
        to_recompute = {edges: c for edges, c in aligned if c and self._plan.is_recomputed(c.run, c.key)}
        column_stacks = {edges: self.stack(edges) for edges in columns if edges not in to_recompute}
        loop_inputs = self._run_inputs[run] = column_stacks | {edge: self._value(edge) for edge in _sources(run, Edge)}
        carried = sorted(_sources(run, Carried), key=_order)
        several, last, before = self._plan.read_outside(run)
        last_alone = [key for key in last if key not in {(c.offset, c.result) for c in carried}]
        for offset in range(run.period):
            loop_inputs[offset] = self._numbers(run, offset)

        def layer(state: list[Any], i: Any) -> tuple[list[Any], list[Any]]:
            values = {source: _at(loop_inputs[source], i) for source in loop_inputs if not isinstance(source, int)}
            values |= zip(carried, state, strict=False)
            recomputed: dict[Any, Any] = {}
            for edges, column in to_recompute.items():
                of_layer = recomputed.setdefault((column.run, column.start, column.step), {})
                index = column.start + i * column.step
                values[edges] = self._recompute(column.run, column.key, index, of_layer)
            results: list[tuple[Any, ...]] = []
            for offset, sources in enumerate(run.sources):
                tensors = [results[s.offset][s.result] if isinstance(s, Inside) else values[s] for s in sources]
                results.append(self._results_of(run, offset, tensors, i))
            after = [results[c.offset][c.result] for c in carried] + [results[o][r] for o, r in last_alone]
            return after, [results[o][r] for o, r in several] + [values[c] for c in before]

        # Arrays are in the order of those that are read, so that a gradient is where its parameter is.
        backwards = sum(stack.step for stack in column_stacks.values()) < 0
        start = [self._value(c.first) for c in carried] + [self._zeros(run, key) for key in last_alone]
        indices = np.arange(run.count, dtype=np.int32)
        end, arrays = scan(layer, start, indices[::-1] if backwards else indices, run.count, backwards)
        place = (run.count - 1, -1) if backwards else (0, 1)
        for key, array in zip(several, arrays, strict=False):
            self._results[run, key] = Stack(array, *place)
        for source, array in zip(before, arrays[len(several) :], strict=True):
            self._before[run, source] = Stack(array, *place)
        keys = [(c.offset, c.result) for c in carried] + last_alone
        self._last |= {(run, key): value for key, value in zip(keys, end, strict=True)}
        return {slot: _Layer(self, run, *divmod(i, run.period)) for i, slot in enumerate(run.slots)}

    def _results_of(self, run: Layers, offset: int, tensors: list[Any], layer: Any) -> tuple[Any, ...]:
        node = common([self._plan.graph.nodes[slot] for slot in run.slots[offset :: run.period]])
        numbers = [_at(number, layer) for number in self._run_inputs[run][offset]]
        seed = (numbers.pop(-2), numbers.pop()) if node.seeded else None
        return self._apply(node, tensors, numbers, seed)

    def _recompute(self, run: Layers, key: Key, layer: Any, layer_results: dict[int, Any]) -> Any:
        """A result of an earlier run's layer, from those that it gave and what it was given."""
        if key[0] not in layer_results:
            tensors = []
            for source in run.sources[key[0]]:
                if isinstance(source, Inside):
                    inner = source.offset, source.result
                    there = self._results.get((run, inner))
                    tensors.append(self._recompute(run, inner, layer, layer_results) if there is None else there[layer])
                elif isinstance(source, Carried):
                    tensors.append(self._before[run, source][layer])
                else:
                    tensors.append(_at(self._run_inputs[run][source], layer))
            layer_results[key[0]] = self._results_of(run, key[0], tensors, layer)
        return layer_results[key[0]][key[1]]

    def stack(self, edges: Edges) -> Stack:
        """These edges' values in one array."""
        column, before = self._plan.column(edges), self._plan.before(edges)
        if before is not None:
            run, source, turned = before
            return _part(self._before[run, source], *((run.count - 1, -1) if turned else (0, 1)))
        if column is not None:
            return _part(self._results[column.run, column.key], column.start, column.step)
        locations = [self._leaves.get(edge.slot) if edge.leaf else None for edge in edges]
        present = [place for place in locations if place is not None]
        steps = {b - a for (_, a), (_, b) in zip(present, present[1:], strict=False)}
        if len(present) == len(edges) and len(steps) == 1 and all(array is present[0][0] for array, _ in present):
            return Stack(present[0][0], present[0][1], steps.pop())
        for ordered, start, step in ((edges, 0, 1), (edges[::-1], len(edges) - 1, -1)):
            if ordered in self._stacked:
                return Stack(self._stacked[ordered], start, step)
        array = self._stacked[edges] = jnp.stack([self._value(edge) for edge in edges])
        return Stack(array, 0, 1)

    def several(self, edges: Edges) -> list[Any]:
        """The values of edges in stacks, those of neighbouring layers in one."""
        parts = []
        start = 0
        while start < len(edges):
            end = start + 1
            column = pair = self._plan.column(edges[start : start + 2])
            while pair and column and abs(pair.step) == 1 and pair == replace(column, start=pair.start):
                end += 1
                pair = self._plan.column(edges[end - 1 : end + 1])
            if column is None or end == start + 1:
                parts.append(self._value(edges[start])[None])
            else:
                stack = _part(self._results[column.run, column.key], column.start, column.step)
                first, last = sorted((stack.start, stack.start + (end - start - 1) * stack.step))
                part = stack.array[first : last + 1]
                parts.append(jnp.flip(part, 0) if stack.step < 0 else part)
            start = end
        return parts

    def result(self, run: Layers, layer: int, key: Key) -> Any:
        """A result of one layer."""
        if layer == run.count - 1 and (run, key) in self._last:
            return self._last[run, key]
        if self._plan.is_recomputed(run, key):
            return self._recompute(run, key, self._index_value(layer), {})
        stack = self._results[run, key]
        index = self._index_value(stack.start + layer * stack.step)
        return jax.lax.dynamic_index_in_dim(stack.array, index, keepdims=False, allow_negative_indices=False)

    def _numbers(self, run: Layers, offset: int) -> list[Any]:
        """The numbers of a node of all layers, where they differ one per layer."""
        columns = zip(*(self._indices[slot] for slot in run.slots[offset :: run.period]), strict=True)
        numbers: list[Any] = []
        for column in columns:
            vector, index = self._vectors[column[0][0]], np.array([index for _, index in column], np.int32)
            same = (index == index[0]).all()
            one = functools.partial(jax.lax.index_in_dim, vector, int(index[0]), keepdims=False)
            numbers.append(one() if same else Stack(vector[index], 0, 1))
        return numbers

    def _zeros(self, run: Layers, key: Key) -> Any:
        meta = self._plan.graph.nodes[run.slots[key[0]]].outs[key[1]]
        assert meta is not None
        return jnp.zeros(meta.shape, dtypes.numpy_dtype(meta.dtype))


class _Layer:
    """The results of one node of a layer, taken out of the arrays when asked for."""

    def __init__(self, loops: Loops, run: Layers, layer: int, offset: int) -> None:
        self._loops, self._run, self._layer, self._offset = loops, run, layer, offset
        self._results: dict[int, Any] = {}

    def __getitem__(self, result: int) -> Any:
        if result not in self._results:
            self._results[result] = self._loops.result(self._run, self._layer, (self._offset, result))
        return self._results[result]


@functools.cache
def cheap(op: str) -> bool:
    """Whether an operator is elementwise or a view, which XLA fuses with what reads its result."""
    return elementwise(op) or any(
        a.alias_info and not a.alias_info.is_write for a in find_overload(op)._schema.arguments
    )


def _at(value: Any, layer: Any) -> Any:
    return value[layer] if isinstance(value, Stack) else value


def _part(stack: Stack, start: int, step: int) -> Stack:
    return Stack(stack.array, stack.start + start * stack.step, step * stack.step)


def _sources(run: Layers, kind: Any) -> list[Any]:
    """The distinct sources of a kind among a run's inputs."""
    return list(dict.fromkeys(s for sources in run.sources for s in sources if isinstance(s, kind)))


def _order(source: Carried) -> tuple[int, ...]:
    return source.offset, source.result, source.first.leaf, source.first.slot, source.first.result
