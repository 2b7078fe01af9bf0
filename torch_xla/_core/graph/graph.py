"""A cut graph as frozen dataclasses, made when it is lowered or shown: nodes, edges between them, result types.

`x * 2 + y` has leaves `x` and `y` and two nodes: `aten.mul.Tensor` with an edge from leaf 0, `aten.add.Tensor` with
edges from node 0 and leaf 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch_xla import _bindings
from torch_xla.ops.registry import Meta


@dataclass(frozen=True, slots=True)
class Edge:
    """An edge from a value to its use: from the leaf, or from a `result` of the node, with index `slot`."""

    leaf: bool
    slot: int
    result: int


Edges = tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class Input:
    """Placeholder in a node's arguments: its `index`-th input."""

    index: int


@dataclass(frozen=True, slots=True)
class Number:
    """Placeholder in a node's arguments: a number that is an input of the program."""

    index: int  # position among the node's numbers
    value: int | float | complex  # at the time of the cut; no part of the program
    argument: int  # position of the argument that it is, or that it is an element of
    varied: bool = False  # whether it was a constant until it varied


@dataclass(frozen=True, slots=True)
class Node:
    """One operator call."""

    op: str  # overload, such as ``aten.add.Tensor``
    args: tuple[Any, ...]  # in schema order, with `Input` and `Number` placeholders
    # one that draws may have an ordering edge after those that its arguments name
    inputs: tuple[Edge, ...]
    outs: tuple[Meta | None, ...]  # the results' types; None for an undefined tensor
    seeded: bool  # whether it draws random numbers, from two more numbers: the words of a seed
    frame: str | None  # the user's line that recorded it, if kept
    # 128-bit hash of the constant arguments and settings; None where it is to be no function of its own
    attrs: tuple[int, int] | None
    scope: str | None = None  # path of the module it belongs to, ``Model/encoder/layer_3``, if kept
    settings: int = 0  # PyTorch's as the call was recorded, see `call_settings.as_recorded`

    @property
    def waits(self) -> bool:
        """Whether the last input is an ordering edge: its value is not read, but must be there."""
        named = sum(isinstance(e, Input) for e in self._elements())
        return self.seeded and len(self.inputs) == named + 1

    @property
    def call(self) -> tuple[Any, ...]:
        """The operator with its constants: equal for nodes that differ in their tensors and numbers only."""
        # `attrs` does not know which of the numbers are constants of this program; 0.0 equals -0.0.
        numbers = tuple(
            type(e.value) if isinstance(e, Number) else e if isinstance(e, int) else repr(e)
            for e in self._elements()
            if isinstance(e, (Number, int, float, complex))
        )
        return self.op, self.attrs, self.settings, numbers

    def numbers(self) -> list[Number]:
        """The placeholders for numbers, in order."""
        return [e for e in self._elements() if isinstance(e, Number)]

    def _elements(self) -> Iterator[Any]:
        """Its arguments, and the elements of those that are lists."""
        for arg in self.args:
            yield from arg if isinstance(arg, list) else [arg]

    def number_inputs(self) -> list[Number | None]:
        """Its inputs from the vectors of numbers, in order: its numbers, then None for each word of its seed."""
        return [*self.numbers(), *[None] * 2 * self.seeded]


@dataclass(frozen=True, slots=True)
class Inside:
    """An input that is a result of the same layer."""

    offset: int
    result: int


@dataclass(frozen=True, slots=True)
class Carried:
    """An input that is a result of the layer before; the first layer has it from elsewhere."""

    offset: int
    result: int
    first: Edge


# What all layers take is an edge; what each takes from elsewhere, an edge per layer.
Source = Inside | Carried | Edge | Edges


@dataclass(frozen=True, eq=False)
class Layers:
    """A run of layers."""

    slots: tuple[int, ...]  # their nodes, layer by layer
    period: int  # how many nodes a layer has
    sources: tuple[tuple[Source, ...], ...]  # where the inputs of each node of a layer come from

    @property
    def count(self) -> int:
        """How many layers there are."""
        return len(self.slots) // self.period

    def slot(self, layer: int, offset: int) -> int:
        """Index of a node in the graph."""
        return self.slots[layer * self.period + offset]


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph to be lowered."""

    key: str  # 32 hexadecimal digits
    device: int
    nodes: tuple[Node, ...]  # in recording order, so that inputs come first
    leaves: tuple[Meta, ...]  # shape and dtype of each input buffer
    outputs: tuple[tuple[int, int], ...]  # (node, result) pairs
    donated: tuple[int, ...]  # leaves whose buffers the program may overwrite
    aliased_outputs: tuple[int, ...] = ()  # for each of them the output that may take its buffer, or -1
    # (leaves, outputs) that travel in one buffer each, end to end; some have no leaves
    packs: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    stacks: int = 0  # how many of them, from the first, are stacks: arrays of tensors of one type
    leaf_frames: tuple[str | None, ...] = ()  # the user's line that made each leaf, if known
    # index of each node's numbers, words of a seed too, in the vector of their type; equal ones may share
    numbers: tuple[int, ...] = ()
    leaf_placements: tuple[int, ...] = ()  # placement number of each leaf; none where buffers are never split
    output_placements: tuple[int, ...] = ()  # likewise that which each output is to have
    layers: tuple[Layers, ...] = ()  # runs of layers that are loops in its program, in order

    def meta(self, edge: Edge) -> Meta | None:
        """The type of what an edge gives."""
        return self.leaves[edge.slot] if edge.leaf else self.nodes[edge.slot].outs[edge.result]


# Those that the recorder describes nodes by.
CLASSES = (Node, Edge, Input, Number, Meta)


def describe(cut: _bindings.Graph) -> Graph:
    """Reads a cut graph out of the recorder."""
    packing = _bindings.Packing(cut)
    return Graph(
        key=cut.key,
        device=cut.device,
        nodes=tuple(cut.describe_nodes(CLASSES)),
        leaves=tuple(Meta(*meta) for meta in cut.leaf_metas),
        outputs=tuple(cut.outputs),
        donated=tuple(cut.donated),
        aliased_outputs=tuple(cut.aliased_outputs[leaf] for leaf in cut.donated),
        packs=tuple(packing.packs),
        stacks=len(cut.stacks),
        leaf_frames=tuple(cut.leaf_frames),
        numbers=cut.number_indices,
        leaf_placements=tuple(cut.leaf_placements) if cut.output_placements else (),
        output_placements=tuple(cut.output_placements),
    )


def fill_template(node: Node, tensors: list[Any], number: Callable[[Number], Any]) -> list[Any]:
    """A node's arguments with each `Input` replaced by its tensor, and each `Number` by the result of `number`."""

    def fill(arg: Any) -> Any:
        if isinstance(arg, Input):
            return tensors[arg.index]
        if isinstance(arg, Number):
            return number(arg)
        if isinstance(arg, list) and any(isinstance(e, (Input, Number)) for e in arg):
            return [fill(e) for e in arg]
        return arg

    return [fill(arg) for arg in node.args]
