"""Building StableHLO composites out of PyTorch code."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import torch

from torch_xla._errors import message
from torch_xla.experimental import xla_marker


@torch.compiler.assume_constant_result
def _instance() -> str:
    return uuid.uuid4().hex


class StableHLOCompositeBuilder:
    """Makes one composite of what is computed from some tensors.

    In an exported module, and in a recorded graph as long as no barrier cuts it in two, the operations between
    `mark_inputs` and `mark_outputs` become one ``stablehlo.composite`` with them as its meaning. A composite has each
    of the two once, and is not inside another one. A recorded graph depends on the builder: keep it over the steps of
    a loop.

    Args:
        name: Name of the composite, such as ``"my.attention"``.
        attr: Its attributes; see `xla_marker.serialize_composite_attr`.
    """

    def __init__(self, name: str, attr: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.attr = attr
        self.id = _instance()

    def _mark(self, tensors: tuple[torch.Tensor, ...], is_input: bool) -> Any:
        attr = None if is_input else xla_marker.serialize_composite_attr(self.attr)
        marked = []
        for position, tensor in enumerate(tensors):
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(message("mark_tensor", f"got {type(tensor).__name__}", expected="tensors"))
            marked.append(torch.ops.xla.mark_tensor(tensor, self.name, position, self.id, is_input, attr))
        return marked[0] if len(marked) == 1 else tuple(marked)

    def mark_inputs(self, *tensors: torch.Tensor) -> Any:
        """The operands of the composite; what it computes must be computed from what is returned.

        Args:
            *tensors: Tensors.

        Returns:
            As many tensors: one, or a tuple.
        """
        return self._mark(tensors, True)

    def mark_outputs(self, *tensors: torch.Tensor) -> Any:
        """The results of the composite; use what is returned instead.

        Args:
            *tensors: Tensors.

        Returns:
            As many tensors: one, or a tuple.
        """
        return self._mark(tensors, False)
