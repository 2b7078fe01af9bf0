"""Shows a pending graph as text, or lowers it with its inputs, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torch_xla import _bindings
from torch_xla._core.device import transfer
from torch_xla._core.execute import barrier
from torch_xla._core.execute.untraced import untraced
from torch_xla._core.graph import graph
from torch_xla.ops.registry import Meta


@untraced
def graph_text(tensors: Sequence[torch.Tensor], form: str) -> Any:
    """The pending graph of tensors on one device, without running it: text, or bytes for protobuf and bytecode.

    Without tensors it is everything pending on the current device. The form is ``"text"``, ``"dot"``, ``"hlo"``,
    ``"hlo_proto"``, ``"stablehlo"`` or ``"stablehlo_bytecode"``.
    """
    from torch_xla._core.report import render

    cut = _bindings.Cut.of_tensors(list(tensors)) if tensors else _bindings.Cut.of_device(_bindings.current_device())
    with barrier.exclusive():
        stages = barrier.stages()
        stages.finish(cut.device)
        pending = cut.preview()
        return stages.numbers.with_constants(
            pending, lambda: render.render(graph.describe(pending), form, _computed(tensors))
        )


@dataclass(frozen=True)
class LoweredGraph:
    """A lowered graph and its inputs, which no barrier writes over."""

    stage: Any  # JAX's lowered stage
    inputs: Sequence[Any]  # shape and dtype of each leaf
    locations: Sequence[Any]  # where their values are
    numbers: Sequence[Any]  # the vectors of numbers, which are the last inputs
    device: int

    def host_inputs(self) -> list[torch.Tensor]:
        """A copy of each input on the host."""
        pairs = zip(self.locations, self.inputs, strict=True)
        leaves = [transfer.download(location, meta.shape, meta.dtype) for location, meta in pairs]
        return leaves + [torch.tensor(vector) for vector in self.numbers]

    def device_inputs(self) -> list[torch.Tensor]:
        """A copy of each input on the device."""
        pairs = zip(self.locations, self.inputs, strict=True)
        leaves = [
            _bindings.tensor_of(transfer.copy(location, meta.shape), list(meta.shape), meta.dtype, self.device)
            for location, meta in pairs
        ]
        return leaves + [torch.tensor(vector).to(torch.device("xla", self.device)) for vector in self.numbers]


@untraced
def lowered(tensors: Sequence[torch.Tensor], name: str, platform: str | None = None) -> LoweredGraph:
    """The program for some tensors on one device, without running it; the name is its module's.

    `platform` is another kind of device that it is for, as `lowering.lower` takes it.
    """
    from torch_xla._core.lower import lowering

    cut = _bindings.Cut.of_tensors(list(tensors))
    with barrier.exclusive():
        stages = barrier.stages()
        stages.finish(cut.device)
        pending = cut.preview()

        def lower() -> LoweredGraph:
            described = graph.describe(pending)
            stage = lowering.lower(described, name, platform=platform).stage
            vectors = [vector for vector in pending.packed_numbers() if vector.size]
            return LoweredGraph(stage, described.leaves, pending.leaf_locations(), vectors, cut.device)

        return stages.numbers.with_constants(pending, lower)


def _computed(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Shape and dtype of those tensors that are no part of a graph any more."""
    return [Meta(tuple(t.shape), t.dtype) for t in tensors if _bindings.location_of(t) is not None]
