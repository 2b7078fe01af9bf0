"""Describes a tensor, and this build, for messages and for people."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_xla import _bindings
from torch_xla._core.device import client
from torch_xla._core.execute import barrier as _barrier
from torch_xla._core.execute import export as _export
from torch_xla._errors import message
from torch_xla._version import __version__
from torch_xla.core import _donation


def type_name(tensor: torch.Tensor) -> str:
    """XLA's name of a tensor's element type, such as ``"f32"``."""
    from torch_xla.ops import dtypes

    return dtypes.xla_name(tensor.dtype)


def _shape_text(tensor: torch.Tensor) -> str:
    return f"{type_name(tensor)}[{','.join(map(str, tensor.shape))}]"


def tensor_info(tensor: torch.Tensor) -> str:
    """Describes a tensor: id, device, shape, and how it is computed if it is pending."""
    if tensor.device.type != "xla":
        return f"Not a XLATensor: it is on {tensor.device}\n"
    if _donation.without_values(tensor):
        return (
            f"Device: {tensor.device}\nXLA Shape: {_shape_text(tensor)}\nIR: None\nXLAData:\n  Data Handle: Deleted\n"
        )
    lines = [
        f"Tensor id: {_bindings.tensor_id(tensor)}",
        f"Device: {tensor.device} ({client.hardware(tensor.device.index)})",
        f"XLA Shape: {_shape_text(tensor)}, strides {tensor.stride()}",
    ]
    if _bindings.location_of(tensor) is None:
        lines += [f"IR: {_export.graph_text([tensor], 'text').rstrip()}", "XLAData: None"]
    else:
        lines += ["IR: None", "XLAData:", f"  Data Device: {tensor.device}", f"  Data Shape: {_shape_text(tensor)}"]
    return "\n".join(lines) + "\n"


def dimension_size(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The size of a dimension as an int32 tensor on the tensor's device."""
    return torch.tensor(tensor.size(dim), dtype=torch.int32, device=tensor.device)


def buffer_pointer(tensor: torch.Tensor) -> int:
    """Address of a tensor's values on its device; they are computed first. It holds until the tensor is written."""
    return int(_barrier.buffers([tensor], wait=True)[0].unsafe_buffer_pointer())


def handles(tensors: Sequence[torch.Tensor]) -> list[int]:
    """A number per tensor that tells whose memory is whose.

    Raises RuntimeError where a tensor's buffer was given to a program that has written over it.
    """
    for tensor in tensors:
        if _bindings.is_lost(tensor):
            raise RuntimeError(
                message("tensor", f"{_shape_text(tensor)}, whose buffer is deleted", expected="a tensor with a buffer")
            )
    return [_bindings.tensor_id(tensor) for tensor in tensors]


def revisions() -> dict[str, str]:
    """The revisions that this package and PyTorch were built from."""
    return {"xla": __version__, "torch": torch.version.git_version or torch.__version__}
