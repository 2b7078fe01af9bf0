"""Writes a graph as text, a node a line, or in Graphviz' language."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_xla._core.graph.graph import Graph, fill_template
from torch_xla.ops import dtypes
from torch_xla.ops.call import find_overload
from torch_xla.ops.registry import Meta


def text(graph: Graph, computed: Sequence[Meta] = ()) -> str:
    """The graph as text: constant numbers, inputs, then one node a line.

    `computed` are further tensors, of the device.
    """
    constants: dict[str, str] = {}
    nodes = [_node_line(graph, i, constants) for i in range(len(graph.nodes))]
    lines = [f"IR {{  # {graph.key} on xla:{graph.device}"]
    lines += [f"  {name} = prim::Constant(), value={value}" for value, name in constants.items()]
    for i, leaf in enumerate(graph.leaves):
        donated = ", donated" if i in graph.donated else ""
        lines.append(f"  %p{i} = xla::device_data(), {meta_text(leaf)}{donated}")
    lines += [f"  %t{i} = xla::device_data(), {meta_text(meta)}" for i, meta in enumerate(computed)]
    loops = [f"  # a loop: {run.count} layers of {run.period} nodes from %{run.slots[0]}" for run in graph.layers]
    return "\n".join([*lines, *loops, *nodes, "}", ""])


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
    scope = f", scope={node.scope}" if node.scope else ""
    where = f", at {_lines(node.frame)}" if node.frame else ""
    name = f"{namespace}::{op}" + ("" if overload == "default" else f".{overload}")
    return f"  %{i} = {name}({shown}), {outs}{root}{scope}{where}"


def _lines(frames: str) -> str:
    """Without the names of functions: what looks for an operator's or a type's name in the text may find it there."""
    return " < ".join(frame.partition(" in ")[0] for frame in frames.split(" < "))


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
