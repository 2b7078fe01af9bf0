"""Runs a cut graph on PyTorch's CPU kernels: the oracle that tells a recording fault from a lowering fault."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_xla._core.graph import Graph, fill_template
from torch_xla.ops.call import find_overload
from torch_xla.ops.decompositions import bind


def interpret(graph: Graph, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Computes the outputs of a graph.

    Args:
        graph: The graph; its numbers keep the values they were cut with.
        leaves: A CPU tensor per leaf.

    Returns:
        A contiguous CPU tensor per output.

    Raises:
        NotImplementedError: The graph draws random numbers, which no other device repeats.
    """
    results: list[list[torch.Tensor | None]] = []
    with torch.no_grad():
        for node in graph.nodes:
            if node.seeded:
                raise NotImplementedError(f"[interpret] {node.op} draws random numbers; seedless graphs only")
            tensors = [leaves[w.slot] if w.leaf else results[w.slot][w.result] for w in node.inputs]
            op = find_overload(node.op)
            values = fill_template(node, tensors, lambda number: number.value)
            values = [torch.device("cpu") if isinstance(v, torch.device) else v for v in values]
            names = [a.name for a in op._schema.arguments]
            positional, keywords = bind(op, (), dict(zip(names, values, strict=True)))
            # A node stands for a value, so an operator that writes must not reach its input's.
            if op._schema.is_mutable:
                positional = [v.clone() if isinstance(v, torch.Tensor) else v for v in positional]
            result = op(*positional, **keywords)
            flat = list(result) if isinstance(result, (list, tuple)) else [result]
            results.append(
                [
                    None if meta is None else value.to(meta.dtype).clone(memory_format=torch.contiguous_format)
                    for value, meta in zip(flat, node.outs, strict=True)
                ]
            )
    return [results[slot][result] for slot, result in graph.outputs]  # type: ignore[misc]
