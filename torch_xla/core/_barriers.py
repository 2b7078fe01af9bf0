"""Barriers inside a graph."""

from __future__ import annotations

import torch


def optimization_barrier_(tensors: list[torch.Tensor]) -> None:
    """Puts tensors behind a barrier that XLA moves no computation across; their values stay as they are.

    Args:
        tensors: Tensors on one device. What is computed from them afterwards is not merged with what was computed
            from them before.
    """
    for tensor, value in zip(tensors, torch.ops.xla.optimization_barrier([t.detach() for t in tensors]), strict=True):
        tensor.data.copy_(value)
