"""Horizontal fusion: what is done alike to each member of a pack is done once, to the whole pack.

An optimizer applies the same few operators to a hundred small tensors. Applied to one flat array of all tensors, each
operator is one kernel instead of a hundred, and the program is lowered and compiled sooner.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from torch_xla._core.graph.graph import Graph, Node, Wire, Wires
from torch_xla._core.graph.layers import elementwise
from torch_xla.ops.registry import Meta

Place = tuple[int, int]  # of a number: vector and index

_LEAST = 4  # members that are worth it
# Operators from the pack back to what is computed one by one; Adam's take nine.
_DEPTH = 64


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A part of another flat array, or all of it."""

    whole: Wires
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class _Alike:
    """One elementwise operator on flat arrays, and on scalars that all members have in common."""

    node: Node
    operands: tuple[Wire | Wires, ...]
    numbers: tuple[tuple[Place, ...], ...]  # per number of the operator, each member's own
    sizes: tuple[int, ...]  # of the members


_Piece = _Stretch | _Alike | Wire


class HorizontalPlan:
    """Plans how the packs among a program's results are computed; it reads the wires in `singles` one by one.

    `places` has for each node where its numbers are in the vectors; `given` and `wanted` are the packs among the inputs
    and the results.
    """

    def __init__(
        self, graph: Graph, places: Sequence[tuple[Place, ...]], given: Sequence[Wires], wanted: Sequence[Wires]
    ) -> None:
        self._graph = graph
        self._numbers = places
        self._flats: dict[Wires, list[_Piece]] = {}  # in an order in which they can be computed
        self._known: set[Wires] = set()
        self._found: dict[Wire, tuple[Wires, int, int]] = {}  # a flat array, the index there and the first element
        self.singles: set[Wire] = set()
        for wires in given:
            self._hold(wires)
        for wires in wanted:
            self._add(wires, _DEPTH)

    def compute(
        self,
        given: dict[Wires, jax.Array],
        value: Callable[[Wire], jax.Array],
        number: Callable[[Place], jax.Array],
        apply: Callable[[Node, list[Any], list[Any]], tuple[jax.Array, ...]],
        flat: Callable[[Wires], list[jax.Array]],
    ) -> dict[Wires, jax.Array]:
        """Computes the flat array of every pack, from `given`, those of the packs among the inputs.

        `value` returns the value of a wire, `number` the number at a place, `apply` the results of a node for given
        tensors and numbers, and `flat` the values of wires end to end, in pieces.
        """
        flats = dict(given)

        def part(piece: _Stretch | _Alike) -> jax.Array:
            if isinstance(piece, _Stretch):
                return jax.lax.slice(flats[piece.whole], (piece.start,), (piece.start + piece.size,))
            tensors = [value(o) if isinstance(o, Wire) else flats[o] for o in piece.operands]
            numbers = [_spread([number(place) for place in column], piece.sizes) for column in piece.numbers]
            return apply(piece.node, tensors, numbers)[0]

        for wires, pieces in self._flats.items():
            parts: list[jax.Array] = []
            together: list[Wire] = []
            alone = 0  # parts that are computed one by one
            for piece in [*pieces, None]:
                if isinstance(piece, Wire):
                    together.append(piece)
                    continue
                if together:
                    flat_parts = flat(tuple(together))
                    parts, alone, together = parts + flat_parts, alone + len(flat_parts), []
                if piece is not None:
                    parts.append(part(piece))
            # Else XLA computes what is single here, each in a branch of one kernel that takes long to compile.
            if alone > _LEAST:
                parts = jax.lax.optimization_barrier(parts)
            flats[wires] = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
        return flats

    def _hold(self, wires: Wires) -> None:
        self._known.add(wires)
        start = 0
        for index, wire in enumerate(wires):
            self._found[wire] = wires, index, start
            start += self._size(wire)

    def _add(self, wires: Wires, depth: int) -> None:
        if wires in self._known:
            return
        pieces = [
            piece if isinstance(piece, (_Stretch, Wire)) else self._together(piece, depth)
            for piece in self._cut(wires, depth)
        ]
        self.singles.update(piece for piece in pieces if isinstance(piece, Wire))
        self._flats[wires] = pieces
        self._hold(wires)

    def _cut(self, wires: Wires, depth: int) -> list[_Stretch | Wire | Wires]:
        """Stretches of a flat array, single wires, and stretches of wires that are computed alike."""
        pieces: list[_Stretch | Wire | Wires] = []
        start = 0
        while start < len(wires):
            location = self._found.get(wires[start])
            follows = self._follows if location else self._alike
            end = start + 1
            while end < len(wires) and follows(wires[end - 1], wires[end]):
                end += 1
            if location:
                flat_wires, _, first = location
                pieces.append(_Stretch(flat_wires, first, sum(map(self._size, wires[start:end]))))
            elif end - start >= _LEAST and depth:
                pieces.append(wires[start:end])
            else:
                pieces += wires[start:end]
            start = end
        return pieces

    def _together(self, members: Wires, depth: int) -> _Alike:
        nodes = [self._graph.nodes[wire.slot] for wire in members]
        operands: list[Wire | Wires] = []
        for column in zip(*(node.inputs for node in nodes), strict=True):
            if self._meta(column[0]).shape == () and len(set(column)) == 1:
                self.singles.add(column[0])
                operands.append(column[0])
            else:
                self._add(column, depth - 1)
                operands.append(column)
        sizes = tuple(map(self._size, members))
        numbers = tuple(zip(*(self._numbers[wire.slot] for wire in members), strict=True))
        node = replace(nodes[0], outs=(Meta((sum(sizes),), self._meta(members[0]).dtype),))
        return _Alike(node, tuple(operands), numbers, sizes)

    def _follows(self, before: Wire, wire: Wire) -> bool:
        """Whether both are neighbours in a flat array."""
        flat_wires, index, _ = self._found[before]
        location = self._found.get(wire)
        return location is not None and location[0] == flat_wires and location[1] == index + 1

    def _alike(self, a: Wire, b: Wire) -> bool:
        """Whether these are results of one elementwise operator on operands of one kind."""
        if a.leaf or b.leaf or b in self._found:
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

    def _pair(self, a: Wire, b: Wire, p: Wire, q: Wire) -> bool:
        """Whether `p` is to `a` what `q` is to `b`: an operand of its shape, or a scalar that both have."""
        first, second = self._meta(p), self._meta(q)
        if p == q and first.shape == ():
            return True
        return (first.dtype, first.shape, second.shape) == (second.dtype, self._meta(a).shape, self._meta(b).shape)

    def _meta(self, wire: Wire) -> Meta:
        if wire.leaf:
            return self._graph.leaves[wire.slot]
        meta = self._graph.nodes[wire.slot].outs[wire.result]
        assert meta is not None
        return meta

    def _size(self, wire: Wire) -> int:
        return math.prod(self._meta(wire).shape)


def _spread(numbers: list[Any], sizes: Sequence[int]) -> Any:
    """The number that all have, or an array with each member's own."""
    if all(number is numbers[0] for number in numbers):
        return numbers[0]
    return jnp.stack(numbers)[np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)]
