"""Values of recorded tensors by PyTorch's CPU kernels: what the recorder meant, before any lowering."""

from __future__ import annotations

import torch

from torch_xla import _bindings
from torch_xla._core.execute import op_by_op
from torch_xla._core.graph import graph, verify


def cut(tensor: torch.Tensor) -> graph.Graph:
    """The verified pending graph of one tensor."""
    described = graph.describe(_bindings.Cut.of_tensors([tensor]).preview())
    verify.verify(described)
    return described


def value(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's value, computed by PyTorch's CPU kernels from its leaves; it stays pending."""
    recorded = _bindings.Cut.of_tensors([tensor.detach()]).preview()
    verify.verify(graph.describe(recorded))
    if not recorded.num_outputs:
        return tensor.cpu()
    (result,) = op_by_op.prepare(recorded).values()
    return result


def _steps(tensor: torch.Tensor) -> list[int]:
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1 and tensor.numel()]


def assert_same(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Values, shape, dtype and strides of a recorded tensor are those of a CPU tensor.

    Strides along dimensions of size 1, and of tensors without elements, address nothing: PyTorch's Meta kernels and
    CPU kernels differ in them.
    """
    torch.testing.assert_close(value(ours), theirs.detach().contiguous(), rtol=1e-5, atol=1e-5, equal_nan=True)
    assert _steps(ours) == _steps(theirs), f"strides {ours.stride()}, on CPU {theirs.stride()}"
    assert ours.storage_offset() == theirs.storage_offset()
    assert ours.is_contiguous() == theirs.is_contiguous()
