"""Renders a graph for people: text, a drawing, HLO, StableHLO."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_xla._core.device import client, placement
from torch_xla._core.graph import graph, graph_text
from torch_xla._core.lower import lowering, rolling
from torch_xla.ops.registry import Meta


def render(described: graph.Graph, form: str, computed: Sequence[Meta] = ()) -> Any:
    """A graph to look at: text, or bytes for ``"hlo_proto"`` and ``"stablehlo_bytecode"``.

    Other forms are ``"text"``, which shows further `computed` tensors of the device, ``"dot"``, ``"hlo"`` and
    ``"stablehlo"``.
    """
    if form == "text":
        if client.client_started():
            place = placement.of(described.device)
            described = rolling.mark_layer_loops(described, place.platform, place.mesh)
        return graph_text.text(described, computed)
    if form == "dot":
        return graph_text.dot(described)
    stage = lowering.lower(described).stage
    if form == "hlo":
        return lowering.hlo_text(stage)
    if form == "hlo_proto":
        module: Any = stage.compiler_ir("hlo")
        return module.as_serialized_hlo_module_proto()
    if form == "stablehlo":
        return stage.as_text()
    if form == "stablehlo_bytecode":
        return lowering.bytecode(stage.compiler_ir("stablehlo"))
    raise ValueError(f"[graph] got form {form!r}, expected text, dot, hlo, hlo_proto, stablehlo or stablehlo_bytecode")
