"""Where a compiled program takes its inputs and gives its results, as far as that was left to XLA."""

from __future__ import annotations

from typing import Any

from torch_xla import _bindings
from torch_xla._core.device import placement, shardings
from torch_xla._core.graph import graph
from torch_xla._core.lower import manual_lowering


def note(loaded: Any, cut: _bindings.Graph, program: _bindings.Program) -> list[int]:
    """Tells a program where its leaves and outputs are.

    Gives the placement number of each result, packs first and the token last.
    """
    packs = [(leaves, outputs) for leaves, outputs in program.packing.packs if outputs]
    packed_inputs = {leaf for leaves, _ in program.packing.packs for leaf in leaves}
    packed_results = {output for _, outputs in packs for output in outputs}
    to = list(cut.output_placements) or [shardings.WHOLE] * cut.num_outputs
    single = [i for i in range(cut.num_outputs) if i not in packed_results]
    if placement.of(cut.device).mesh:
        at = list(cut.leaf_placements)
        described = graph.describe(cut)
        parts = manual_lowering.find(described)
        for i, (node, _) in enumerate(described.outputs):
            if node in parts:
                to[i] = shardings.PARTS
        metas = cut.leaf_metas
        in_shardings, out_shardings = loaded.get_parameter_shardings(), loaded.get_output_shardings()
        inputs = [i for i in range(len(at)) if i not in packed_inputs]
        for slot, leaf in enumerate(inputs):
            if at[leaf] == shardings.ANYWHERE:
                at[leaf] = (
                    shardings.of_xla(in_shardings[slot], len(metas[leaf][0])) if in_shardings else shardings.KNOWN_WHOLE
                )
        shapes = program.packing.result_metas(cut)
        for slot, output in enumerate(single, len(packs)):
            if to[output] == shardings.ANYWHERE:
                to[output] = (
                    shardings.of_xla(out_shardings[slot], len(shapes[slot][0]))
                    if out_shardings
                    else shardings.KNOWN_WHOLE
                )
        for _, outputs in packs:
            for output in outputs:
                to[output] = shardings.KNOWN_WHOLE if to[output] == shardings.ANYWHERE else to[output]
        program.set_placements(at, to)
    return [shardings.WHOLE] * len(packs) + [to[i] for i in single] + [shardings.WHOLE]
