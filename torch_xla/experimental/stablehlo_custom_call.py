"""Custom calls, and two of them that say in which memory a tensor shall be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_xla._core.functions import custom_calls
from torch_xla._core.functions.custom_calls import stablehlo_custom_call as stablehlo_custom_call


def extract_custom_call_outputs_shape_dtype(
    n: torch.fx.Node,
) -> tuple[Sequence[torch.Size], Sequence[torch.dtype]]:
    """Shapes and dtypes of what a node of a traced graph gives; all of it must be tensors."""
    tensors = custom_calls.values_of(n)
    return [t.shape for t in tensors], [t.dtype for t in tensors]


def _placed(t: torch.Tensor, memory: str) -> torch.Tensor:
    result = stablehlo_custom_call(
        [t],
        "annotate_device_placement",
        [t.shape],
        [t.dtype],
        has_side_effect=True,
        frontend_attributes={"_xla_buffer_placement": memory},
    )
    assert isinstance(result, torch.Tensor)
    return result


def _same_gradient(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    return grad


@torch.library.custom_op("xla::place_to_host", mutates_args=())
def place_to_host(t: torch.Tensor) -> torch.Tensor:
    """A tensor's values in the host's memory, where the compiler can move them there."""
    return _placed(t, "pinned_host")


@torch.library.custom_op("xla::place_to_device", mutates_args=())
def place_to_device(t: torch.Tensor) -> torch.Tensor:
    """A tensor's values in the device's memory."""
    return _placed(t, "device")


for _operator in (place_to_host, place_to_device):
    _operator.register_fake(torch.empty_like)
    _operator.register_autograd(_same_gradient)
