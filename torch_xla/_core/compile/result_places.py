"""Reads from a compiled program the placements of inputs and results that were left to XLA."""

from __future__ import annotations

import math
from typing import Any

from torch_xla import _bindings
from torch_xla._core.device import placement, shardings
from torch_xla._core.graph.graph import describe
from torch_xla._core.lower import manual_lowering
from torch_xla.ops.registry import Meta


def types(graph: _bindings.Graph, packing: _bindings.Packing) -> list[Meta]:
    """Shape and dtype of each result of a graph's program: the packs, then the outputs that travel alone."""
    outputs = [Meta(*meta) for meta in graph.output_metas]
    results = []
    for i, (_, members) in enumerate(packing.packs):
        if members:
            shapes = [outputs[output].shape for output in members]
            shape = (len(members), *shapes[0]) if i < len(graph.stacks) else (sum(map(math.prod, shapes)),)
            results.append(Meta(shape, outputs[members[0]].dtype))
    packed = {output for _, members in packing.packs for output in members}
    return results + [meta for output, meta in enumerate(outputs) if output not in packed]


def note(loaded: Any, graph: _bindings.Graph, program: _bindings.Program) -> list[int]:
    """Tells a program where its leaves and outputs are.

    Gives the placement number of each result, packs first and the token last.
    """
    packs = [(leaves, outputs) for leaves, outputs in program.packing.packs if outputs]
    packed_inputs = {leaf for leaves, _ in program.packing.packs for leaf in leaves}
    packed_results = {output for _, outputs in packs for output in outputs}
    to = list(graph.output_placements) or [shardings.REPLICATED] * graph.num_outputs
    single = [i for i in range(graph.num_outputs) if i not in packed_results]
    if placement.of(graph.device).mesh:
        at = list(graph.leaf_placements)
        described = describe(graph)
        parts = manual_lowering.find(described)
        for i, (node, _) in enumerate(described.outputs):
            if node in parts:
                to[i] = shardings.MANUAL
        metas = graph.leaf_metas
        in_shardings, out_shardings = loaded.get_parameter_shardings(), loaded.get_output_shardings()
        inputs = [i for i in range(len(at)) if i not in packed_inputs]
        for slot, leaf in enumerate(inputs):
            if at[leaf] == shardings.UNSPECIFIED:
                at[leaf] = (
                    shardings.of_xla(in_shardings[slot], len(metas[leaf][0]))
                    if in_shardings
                    else shardings.EXPLICITLY_REPLICATED
                )
        out_metas = graph.output_metas
        for slot, output in enumerate(single, len(packs)):
            if to[output] == shardings.UNSPECIFIED:
                to[output] = (
                    shardings.of_xla(out_shardings[slot], len(out_metas[output][0]))
                    if out_shardings
                    else shardings.EXPLICITLY_REPLICATED
                )
        for _, outputs in packs:
            for output in outputs:
                to[output] = shardings.EXPLICITLY_REPLICATED if to[output] == shardings.UNSPECIFIED else to[output]
        program.set_placements(at, to)
    return [shardings.REPLICATED] * len(packs) + [to[i] for i in single] + [shardings.REPLICATED]
