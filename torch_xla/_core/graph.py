"""A cut graph as Python sees it: nodes, wiring and promised results. Made only when a graph is lowered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_xla import _bindings
from torch_xla.ops import dtypes
from torch_xla.ops.call import find_overload
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
    """

    index: int
    value: int | float | complex


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
        attrs: 128-bit hash of the constant arguments.
    """

    op: str
    args: tuple[Any, ...]
    inputs: tuple[Wire, ...]
    outs: tuple[Meta | None, ...]
    seeded: bool
    frame: str | None
    attrs: tuple[int, int]

    @property
    def waits(self) -> bool:
        """Whether the last input is one that only must be there."""
        named = sum(isinstance(e, Input) for arg in self.args for e in (arg if isinstance(arg, list) else [arg]))
        return self.seeded and len(self.inputs) == named + 1

    def numbers(self) -> list[Number]:
        """The placeholders for numbers, in order."""
        return [arg for arg in self.args if isinstance(arg, Number)]


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
        packs: (leaves, outputs) that travel in one buffer each, end to end; some have no leaves.
    """

    key: str
    device: int
    nodes: tuple[Node, ...]
    leaves: tuple[Meta, ...]
    outputs: tuple[tuple[int, int], ...]
    donated: tuple[int, ...]
    packs: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = ()


def describe(cut: _bindings.Graph) -> Graph:
    """Reads a cut graph out of the recorder."""
    return Graph(
        key=cut.key,
        device=cut.device,
        nodes=tuple(_node(*parts) for parts in cut.describe_nodes()),
        leaves=tuple(Meta(*meta) for meta in cut.leaf_metas),
        outputs=tuple(cut.outputs),
        donated=tuple(cut.donated),
        packs=tuple(_bindings.Packing(cut).packs),
    )


def _node(
    op: str,
    args: list[tuple[str, int, Any]],
    inputs: list[tuple[bool, int, int]],
    outs: list[Any],
    seeded: bool,
    static_numbers: bool,
    frame: str | None,
    attrs: tuple[int, int],
) -> Node:
    next_input = _counter(Input)
    numbers = 0
    template: list[Any] = []
    for kind, count, value in args:
        if kind == "input":
            template.append(next_input())
        elif kind == "inputs":
            template.append([next_input() for _ in range(count)])
        elif kind == "optional_inputs":
            template.append([next_input() if value >> i & 1 else None for i in range(count)])
        elif kind == "number" and not static_numbers:
            template.append(Number(numbers, value))
            numbers += 1
        else:
            template.append(value)
    metas = tuple(None if meta is None else Meta(*meta) for meta in outs)
    return Node(op, tuple(template), tuple(Wire(*wire) for wire in inputs), metas, seeded, frame, attrs)


def _counter(make: Callable[[int], Any]) -> Callable[[], Any]:
    count = -1

    def next_one() -> Any:
        nonlocal count
        count += 1
        return make(count)

    return next_one


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
        if isinstance(arg, list) and any(isinstance(e, Input) for e in arg):
            return [fill(e) for e in arg]
        return arg

    return [fill(arg) for arg in node.args]


def text(graph: Graph, computed: Sequence[Meta] = ()) -> str:
    """The graph as text: constant numbers, inputs, then one node a line.

    Args:
        graph: The graph.
        computed: Further tensors to show, whose values are on the device.
    """
    constants: dict[str, str] = {}
    nodes = [_node_line(graph, i, constants) for i in range(len(graph.nodes))]
    lines = [f"IR {{  # {graph.key} on xla:{graph.device}"]
    lines += [f"  {name} = prim::Constant(), value={value}" for value, name in constants.items()]
    for i, leaf in enumerate(graph.leaves):
        donated = ", donated" if i in graph.donated else ""
        lines.append(f"  %p{i} = xla::device_data(), {meta_text(leaf)}{donated}")
    lines += [f"  %t{i} = xla::device_data(), {meta_text(meta)}" for i, meta in enumerate(computed)]
    return "\n".join([*lines, *nodes, "}", ""])


def _node_line(graph: Graph, i: int, constants: dict[str, str]) -> str:
    node = graph.nodes[i]
    tensors = [f"%p{w.slot}" if w.leaf else f"%{w.slot}" + (f".{w.result}" if w.result else "") for w in node.inputs]
    args = fill_template(node, tensors, lambda n: f"number({n.value!r})")
    schema = find_overload(node.op)._schema
    for k, (arg, declared) in enumerate(zip(node.args, schema.arguments, strict=False)):
        if isinstance(arg, (bool, int, float, complex)) and isinstance(declared.type, torch.NumberType):
            args[k] = constants.setdefault(repr(arg), f"%c{len(constants)}")
    namespace, op, overload = node.op.split(".")
    shown = ", ".join(_arg_text(a) for a in args)
    outs = ", ".join("None" if m is None else meta_text(m) for m in node.outs)
    roots = [k for k, (slot, _) in enumerate(graph.outputs) if slot == i]
    root = f", ROOT={roots}" if roots else ""
    where = f", at {node.frame}" if node.frame else ""
    name = f"{namespace}::{op}" + ("" if overload == "default" else f".{overload}")
    return f"  %{i} = {name}({shown}), {outs}{root}{where}"


def _arg_text(arg: Any) -> str:
    if isinstance(arg, list):
        return "[" + ", ".join(_arg_text(a) for a in arg) + "]"
    return str(arg)


def meta_text(meta: Meta) -> str:
    """Type and sizes as XLA writes them: ``f32[2,3]``."""
    return f"{dtypes.xla_name(meta.dtype)}[{','.join(map(str, meta.shape))}]"


def dot(graph: Graph) -> str:
    """The graph in Graphviz' language."""
    lines = ["digraph G {"]
    lines += [f'  p{i} [shape=box, label="input {i}\\n{meta_text(m)}"];' for i, m in enumerate(graph.leaves)]
    for i, node in enumerate(graph.nodes):
        label = "\\n".join([node.op, *("None" if m is None else meta_text(m) for m in node.outs)])
        lines.append(f'  n{i} [label="{label}"];')
        lines += [f"  {'p' if w.leaf else 'n'}{w.slot} -> n{i};" for w in node.inputs]
    return "\n".join([*lines, "}", ""])
