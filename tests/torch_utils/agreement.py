"""A program on device xla agrees with itself on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import torch_xla

Program = Callable[[str], Any]


def numbers(device: str) -> Tensor:
    return torch.arange(1.0, 5.0).to(device)


def compare(program: Program) -> None:
    """Runs a program of a device on both, and compares all it returns, which must be tensors of that device."""
    results = []
    for device in ("xla", "cpu"):
        torch.manual_seed(0)
        results.append(tree_leaves(program(device)))
        if device == "xla":
            torch_xla.sync()  # by a compiled program: small values that are only read may be computed on the host
    for ours, theirs in zip(*results, strict=True):
        assert ours.device.type == "xla"
        torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-4, atol=1e-4)
