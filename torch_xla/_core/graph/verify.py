"""Checks a cut graph, in tests (``XLA_VERIFY_GRAPHS=1``): a fault is named before XLA sees it."""

from __future__ import annotations

from torch_xla._core.graph.graph import Graph, Input
from torch_xla.ops.call import find_overload


class GraphError(RuntimeError):
    """A cut graph that breaks a rule of its own making: a fault of this package."""


def verify(graph: Graph) -> None:
    """Checks edges, order, arity and outputs; GraphError names a node of which something does not hold."""
    for i, node in enumerate(graph.nodes):
        at = f"[verify] node {i} ({node.op})"
        used = [e.index for arg in node.args for e in (arg if isinstance(arg, list) else [arg]) if isinstance(e, Input)]
        if used != list(range(len(node.inputs) - node.waits)):
            raise GraphError(f"{at} uses inputs {used}, has {len(node.inputs)}")
        arity = len(find_overload(node.op)._schema.arguments)
        if len(node.args) != arity:
            raise GraphError(f"{at} has {len(node.args)} arguments, its schema {arity}")
        for edge in node.inputs:
            if edge.leaf:
                if not 0 <= edge.slot < len(graph.leaves):
                    raise GraphError(f"{at} reads leaf {edge.slot} of {len(graph.leaves)}")
            elif not 0 <= edge.slot < i:
                raise GraphError(f"{at} reads node {edge.slot}, which does not come before it")
            elif (
                not 0 <= edge.result < len(graph.nodes[edge.slot].outs)
                or graph.nodes[edge.slot].outs[edge.result] is None
            ):
                raise GraphError(f"{at} reads result {edge.result} of node {edge.slot}, which gives none such")
    if len(set(graph.outputs)) != len(graph.outputs):
        raise GraphError(f"[verify] an output is listed twice: {graph.outputs}")
    for slot, result in graph.outputs:
        if not 0 <= slot < len(graph.nodes) or not 0 <= result < len(graph.nodes[slot].outs):
            raise GraphError(f"[verify] output {(slot, result)} does not exist")
    if any(not 0 <= leaf < len(graph.leaves) for leaf in graph.donated):
        raise GraphError(f"[verify] donated leaves {graph.donated} of {len(graph.leaves)}")
