"""The program that computes some tensors, for tools that compile or inspect it themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_xla._core.execute import export as _export
from torch_xla._errors import message


class LoweringContext:
    """A program without its numbers: what computes the tensors given to `build`.

    Args:
        name: Name of the module.
        device: Not used: the program is for the device of the tensors.
    """

    def __init__(self, name: str = "graph", device: str = "") -> None:
        self._name = name
        self._program: _export.LoweredGraph | None = None

    def build(self, tensors: Sequence[torch.Tensor]) -> None:
        """Lowers what computes some tensors; they stay pending.

        Args:
            tensors: Tensors on one XLA device.
        """
        self._program = _export.lowered(tensors, self._name)

    @property
    def _built(self) -> _export.LoweredGraph:
        if self._program is None:
            raise RuntimeError(message("lowering", "nothing was built", expected="tensors", do="call build(tensors)"))
        return self._program

    def _computation(self) -> Any:
        return self._built.stage.compiler_ir("hlo")

    def hlo(self) -> bytes:
        """The module as a serialized `HloModuleProto`."""
        return self._computation().as_serialized_hlo_module_proto()

    def hlo_text(self) -> str:
        """The main fields of the `HloModuleProto` as text."""
        from torch_xla._core.report import hlo_proto

        return hlo_proto.text(hlo_proto.parse(self.hlo()))

    def hlo_json(self) -> str:
        """The main fields of the `HloModuleProto` as JSON."""
        from torch_xla._core.report import hlo_proto

        return hlo_proto.to_json(hlo_proto.parse(self.hlo()))

    def parameter_id_tensor_mapping(self) -> dict[int, torch.Tensor]:
        """By number of the parameter a copy of its values on the host."""
        return dict(enumerate(self._built.host_inputs()))

    def device_parameter_id_tensor_mapping(self) -> dict[int, torch.Tensor]:
        """By number of the parameter a copy of its values on the device."""
        return dict(enumerate(self._built.device_inputs()))
