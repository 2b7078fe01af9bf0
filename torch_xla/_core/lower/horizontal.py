"""Horizontal fusion: an operator that is applied to each member of a pack is applied once, to the pack.

An optimizer applies the same few operators to a hundred small tensors (PyTorch's foreach): `p0 - lr * g0` and
`p1 - lr * g1` become `p - lr * g` on flat arrays of all parameters and gradients. Each operator is one kernel instead
of a hundred, and the program is lowered and compiled sooner. A stack stays an array of its members: flat
ones are copies of it on devices whose arrays are laid out in tiles.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_xla._core.graph.graph import Edge, Edges, Graph, Node
from torch_xla._core.graph.layers import elementwise
from torch_xla.ops.registry import Meta

NumberIndex = tuple[int, int]  # of a number: vector and index

_LEAST = 4  # members that are worth it
# Operators from the pack back to what is computed one by one; Adam's take nine.
_DEPTH = 64


@dataclass(frozen=True, slots=True)
class _Slice:
    """A part of another flat array, or all of it."""

    flat: Edges
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class _Elementwise:
    """One elementwise operator on flat arrays, and on scalars that all members have in common."""

    node: Node
    operands: tuple[Edge | Edges, ...]
    numbers: tuple[tuple[NumberIndex, ...], ...]  # per number of the operator, each member's own
    sizes: tuple[int, ...]  # of the members


_Part = _Slice | _Elementwise | Edge


class HorizontalPlan:
    """Plans how the packs among a program's results are computed; it reads the edges in `singles` one by one.

    `number_indices` has for each node where its numbers are in the vectors; `input_packs` and `result_packs` are the
    packs among the inputs and the results, and `stacks` those that are arrays of their members.
    """

    def __init__(
        self,
        graph: Graph,
        number_indices: Sequence[tuple[NumberIndex, ...]],
        input_packs: Sequence[Edges],
        result_packs: Sequence[Edges],
        stacks: Collection[Edges] = (),
    ) -> None:
        self._graph = graph
        self._numbers = number_indices
        self._flats: dict[Edges, list[_Part]] = {}  # in an order in which they can be computed
        self._shapes: dict[Edges, tuple[int, ...]] = {}  # of the array of some edges
        self._locations: dict[Edge, tuple[Edges, int, int]] = {}  # a flat array, the index there and the first element
        self.singles: set[Edge] = set()
        for edges in input_packs:
            self._add_locations(edges, edges in stacks)
        for edges in result_packs:
            self._add(edges, _DEPTH, edges in stacks)

    def compute(
        self,
        input_packs: dict[Edges, jax.Array],
        value: Callable[[Edge], jax.Array],
        number: Callable[[NumberIndex], jax.Array],
        apply: Callable[[Node, list[Any], list[Any]], tuple[jax.Array, ...]],
        several: Callable[[Edges], list[jax.Array]],
    ) -> dict[Edges, jax.Array]:
        """Computes the array of every pack, from `input_packs`, those of the packs among the inputs.

        `value` returns the value of an edge, `number` the number at a place, `apply` the results of a node for given
        tensors and numbers, and `several` the values of edges in stacks, in pieces.
        """
        flats = dict(input_packs)

        def part(piece: _Slice | _Elementwise) -> jax.Array:
            if isinstance(piece, _Slice):
                whole = flats[piece.flat]
                unit = math.prod(whole.shape[1:])
                return jax.lax.slice_in_dim(whole, piece.start // unit, (piece.start + piece.size) // unit)
            (out,) = piece.node.outs
            assert out is not None
            tensors = [value(o) if isinstance(o, Edge) else flats[o].reshape(out.shape) for o in piece.operands]
            if all(isinstance(o, Edge) for o in piece.operands):  # every member is the same scalar
                tensors = [jnp.broadcast_to(x, out.shape) for x in tensors]
            rows = piece.sizes if len(out.shape) == 1 else (1,) * len(piece.sizes)
            numbers = [_spread([number(place) for place in column], rows, len(out.shape)) for column in piece.numbers]
            return apply(piece.node, tensors, numbers)[0]

        for edges, pieces in self._flats.items():
            parts: list[jax.Array] = []
            shape = (-1, *self._shapes[edges][1:])
            single_edges: list[Edge] = []
            count_of_singles = 0  # parts that are computed one by one
            for piece in [*pieces, None]:
                if isinstance(piece, Edge):
                    single_edges.append(piece)
                    continue
                if single_edges:
                    flat_parts = several(tuple(single_edges))
                    parts, count_of_singles, single_edges = parts + flat_parts, count_of_singles + len(flat_parts), []
                if piece is not None:
                    parts.append(part(piece))
            # Else XLA computes what is single here, each in a branch of one kernel that takes long to compile.
            if count_of_singles > _LEAST:
                parts = jax.lax.optimization_barrier(parts)
            parts = [each.reshape(shape) for each in parts]
            flats[edges] = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
        return flats

    def _add_locations(self, edges: Edges, is_stack: bool) -> None:
        members = (len(edges), *self._meta(edges[0]).shape)
        self._shapes[edges] = members if is_stack else (sum(map(self._size, edges)),)
        start = 0
        for index, edge in enumerate(edges):
            self._locations[edge] = edges, index, start
            start += self._size(edge)

    def _add(self, edges: Edges, depth: int, is_stack: bool) -> None:
        if edges in self._shapes:
            return
        pieces = [
            piece if isinstance(piece, (_Slice, Edge)) else self._elementwise(piece, depth, is_stack)
            for piece in self._cut(edges, depth)
        ]
        self.singles.update(piece for piece in pieces if isinstance(piece, Edge))
        self._flats[edges] = pieces
        self._add_locations(edges, is_stack)

    def _cut(self, edges: Edges, depth: int) -> list[_Slice | Edge | Edges]:
        """Stretches of a flat array, single edges, and stretches of edges that are computed alike."""
        pieces: list[_Slice | Edge | Edges] = []
        start = 0
        while start < len(edges):
            location = self._locations.get(edges[start])
            follows = self._follows if location else self._same_operator
            end = start + 1
            while end < len(edges) and follows(edges[end - 1], edges[end]):
                end += 1
            if location:
                flat_edges, _, first = location
                pieces.append(_Slice(flat_edges, first, sum(map(self._size, edges[start:end]))))
            elif end - start >= _LEAST and depth:
                pieces.append(edges[start:end])
            else:
                pieces += edges[start:end]
            start = end
        return pieces

    def _elementwise(self, members: Edges, depth: int, is_stack: bool) -> _Elementwise:
        nodes = [self._graph.nodes[edge.slot] for edge in members]
        operands: list[Edge | Edges] = []
        for column in zip(*(node.inputs for node in nodes), strict=True):
            if self._meta(column[0]).shape == () and len(set(column)) == 1:
                self.singles.add(column[0])
                operands.append(column[0])
            else:
                self._add(column, depth - 1, is_stack)
                operands.append(column)
        sizes = tuple(map(self._size, members))
        numbers = tuple(zip(*(self._numbers[edge.slot] for edge in members), strict=True))
        first = self._meta(members[0])
        shape = (len(members), *first.shape) if is_stack else (sum(sizes),)
        node = replace(nodes[0], outs=(Meta(shape, first.dtype),))
        return _Elementwise(node, tuple(operands), numbers, sizes)

    def _follows(self, before: Edge, edge: Edge) -> bool:
        """Whether both are neighbours in a flat array."""
        flat_edges, index, _ = self._locations[before]
        location = self._locations.get(edge)
        return location is not None and location[0] == flat_edges and location[1] == index + 1

    def _same_operator(self, a: Edge, b: Edge) -> bool:
        """Whether these are results of one elementwise operator on operands of one kind."""
        if a.leaf or b.leaf or b in self._locations:
            return False
        one, other = self._graph.nodes[a.slot], self._graph.nodes[b.slot]
        if one.call != other.call or one.seeded or len(one.outs) != 1 or not elementwise(one.op):
            return False
        if len(one.inputs) != len(other.inputs):
            return False
        # Promotion asks whether an operand has dimensions, and a member without any gets one.
        if () in (self._meta(a).shape, self._meta(b).shape) and len({self._meta(p).dtype for p in one.inputs}) > 1:
            return False
        return all(map(functools.partial(self._pair, a, b), one.inputs, other.inputs))

    def _pair(self, a: Edge, b: Edge, p: Edge, q: Edge) -> bool:
        """Whether `p` is to `a` what `q` is to `b`: an operand of its shape, or a scalar that both have."""
        first, second = self._meta(p), self._meta(q)
        if p == q and first.shape == ():
            return True
        return (first.dtype, first.shape, second.shape) == (second.dtype, self._meta(a).shape, self._meta(b).shape)

    def _meta(self, edge: Edge) -> Meta:
        if edge.leaf:
            return self._graph.leaves[edge.slot]
        meta = self._graph.nodes[edge.slot].outs[edge.result]
        assert meta is not None
        return meta

    def _size(self, edge: Edge) -> int:
        return math.prod(self._meta(edge).shape)


def _spread(numbers: list[Any], sizes: Sequence[int], dims: int) -> Any:
    """The number that all have, or an array with each member's own so often, of so many dimensions."""
    if all(number is numbers[0] for number in numbers):
        return numbers[0]
    each = jnp.stack(numbers)[np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)]
    return each.reshape(-1, *(1,) * (dims - 1))
