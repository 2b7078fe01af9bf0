"""A cut graph as Python sees it: nodes, wiring and promised results. Made only when a graph is lowered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch_xla import _bindings
from torch_xla.ops.registry import Meta


@dataclass(frozen=True, slots=True)
class Wire:
    """Where an input comes from.

    Attributes:
        leaf: Whether it is a leaf of the graph.
        slot: Index of the leaf, or of the node.
        result: Which result of the node.
    """

    leaf: bool
    slot: int
    result: int


Wires = tuple[Wire, ...]


@dataclass(frozen=True, slots=True)
class Input:
    """Placeholder in a node's arguments: its `index`-th input."""

    index: int


@dataclass(frozen=True, slots=True)
class Number:
    """Placeholder in a node's arguments: a number that is an input of the program.

    Attributes:
        index: Position among the node's numbers.
        value: Value at the time of the cut; no part of the program.
        argument: Position of the argument that it is, or that it is an element of.
        varied: Whether it was a constant until it varied.
    """

    index: int
    value: int | float | complex
    argument: int
    varied: bool = False


@dataclass(frozen=True, slots=True)
class Node:
    """One operator call.

    Attributes:
        op: Overload name, such as ``aten.add.Tensor``.
        args: Arguments in schema order with `Input` and `Number` placeholders.
        inputs: Where the inputs come from. A node that draws random numbers may have one more than its arguments
            name, a value that must be there before it starts.
        outs: Promised results; None for an undefined tensor.
        seeded: Whether it draws random numbers, from two more numbers: seed and offset.
        frame: The user's line that recorded it, if kept.
        attrs: 128-bit hash of the constant arguments and the settings; None where it is to be no function of its own in
            the module.
        scope: Path of the module it belongs to, ``Model/encoder/layer_3``, if kept.
        settings: PyTorch's as the call was recorded, see `call_settings.as_recorded`.
    """

    op: str
    args: tuple[Any, ...]
    inputs: tuple[Wire, ...]
    outs: tuple[Meta | None, ...]
    seeded: bool
    frame: str | None
    attrs: tuple[int, int] | None
    scope: str | None = None
    settings: int = 0

    @property
    def waits(self) -> bool:
        """Whether the last input is one that only must be there."""
        named = sum(isinstance(e, Input) for e in self._elements())
        return self.seeded and len(self.inputs) == named + 1

    @property
    def call(self) -> tuple[Any, ...]:
        """Equal for nodes that do the same, with tensors and numbers of their own."""
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
        """What it takes from the vectors of numbers, in order: its numbers, then None for seed and offset."""
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
    first: Wire


# What all layers take is a wire; what each takes from elsewhere, a wire per layer.
Source = Inside | Carried | Wire | Wires


@dataclass(frozen=True, eq=False)
class Layers:
    """A run of layers.

    Attributes:
        slots: Their nodes, layer by layer.
        period: How many nodes a layer has.
        sources: Where the inputs of each node of a layer come from.
    """

    slots: tuple[int, ...]
    period: int
    sources: tuple[tuple[Source, ...], ...]

    @property
    def count(self) -> int:
        """How many layers there are."""
        return len(self.slots) // self.period

    def slot(self, layer: int, offset: int) -> int:
        """Index of a node in the graph."""
        return self.slots[layer * self.period + offset]


@dataclass(frozen=True, slots=True)
class Graph:
    """What is lowered.

    Attributes:
        key: Structural key, 32 hexadecimal digits.
        device: Index of the device.
        nodes: In recording order, so that inputs come first.
        leaves: Shape and dtype of each input buffer.
        outputs: (node, result) pairs.
        donated: Indices of the leaves whose buffers the program may overwrite.
        successors: For each of them the output that its tensor has instead, or -1.
        packs: (leaves, outputs) that travel in one buffer each, end to end; some have no leaves.
        stacks: So many of them, the first ones, are arrays of tensors of one type; some have no outputs.
        leaf_frames: The user's line that made each leaf, if known.
        numbers: For each number of the nodes, seed and offset included, its index in the vector of its type. Equal ones
            may have one place.
        leaf_places: Placement number of each leaf; none where buffers are never split.
        wanted_places: Likewise that which each output is to have.
        layers: Runs of layers that are loops in its program, in order.
    """

    key: str
    device: int
    nodes: tuple[Node, ...]
    leaves: tuple[Meta, ...]
    outputs: tuple[tuple[int, int], ...]
    donated: tuple[int, ...]
    successors: tuple[int, ...] = ()
    packs: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()
    stacks: int = 0
    leaf_frames: tuple[str | None, ...] = ()
    numbers: tuple[int, ...] = ()
    leaf_places: tuple[int, ...] = ()
    wanted_places: tuple[int, ...] = ()
    layers: tuple[Layers, ...] = ()


# Those that the recorder describes nodes by.
CLASSES = (Node, Wire, Input, Number, Meta)


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
        successors=tuple(cut.successors[leaf] for leaf in cut.donated),
        packs=tuple(packing.packs),
        stacks=len(cut.stacks),
        leaf_frames=tuple(cut.leaf_frames),
        numbers=cut.number_places,
        leaf_places=tuple(cut.leaf_places) if cut.wanted_places else (),
        wanted_places=tuple(cut.wanted_places),
    )


def fill_template(node: Node, tensors: list[Any], number: Callable[[Number], Any]) -> list[Any]:
    """A node's arguments with its placeholders replaced.

    Args:
        node: The node.
        tensors: One value per input.
        number: Gives the value of a number placeholder.
    """

    def fill(arg: Any) -> Any:
        if isinstance(arg, Input):
            return tensors[arg.index]
        if isinstance(arg, Number):
            return number(arg)
        if isinstance(arg, list) and any(isinstance(e, (Input, Number)) for e in arg):
            return [fill(e) for e in arg]
        return arg

    return [fill(arg) for arg in node.args]
