"""Result types of elementwise operators: those of the CPU kernel, where the Meta kernel promises another."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import torch_xla

A = torch.ops.aten
TYPES = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.float32, torch.complex64]


def results(function: Callable[..., Tensor], *types: Any) -> list[Any]:
    """On the device and on the CPU: the result, or the type of the error."""
    actual: list[Any] = []
    for device in ("xla", "cpu"):
        given = [torch.tensor([1, 0, 1]).to(device, t) if isinstance(t, torch.dtype) else t for t in types]
        try:
            actual.append(function(*given))
        except (RuntimeError, NotImplementedError) as error:
            actual.append(type(error))
    return actual


@pytest.mark.parametrize("number", [True, False, 1, 2.5], ids=repr)
@pytest.mark.parametrize(
    "function",
    [operator.pow, operator.ipow, operator.add, operator.mul, operator.truediv, torch.clamp],
)
def test_of_a_tensor_and_a_number(function: Callable[..., Tensor], number: float) -> None:
    pairs = [results(function, dtype, number) for dtype in TYPES]
    torch_xla.sync()
    for ours, theirs in pairs:
        if isinstance(theirs, type):
            assert isinstance(ours, type), f"CPU raises {theirs}"
        else:
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours.cpu(), theirs, equal_nan=True)


@pytest.mark.parametrize(
    ("op", "types"),
    [
        (lambda g, x: A.threshold_backward.default(g, x, 0), (torch.int64, torch.uint8)),
        (lambda x, y: A.native_dropout_backward.default(x, y, 2.0), (torch.float16, torch.bool)),
        (F.mse_loss, (torch.float16, torch.float32)),
        (torch.where, (torch.bool, torch.float16, torch.float32)),
    ],
)
def test_of_mixed_types(op: Callable[..., Tensor], types: tuple[torch.dtype, ...]) -> None:
    ours, theirs = results(op, *types)
    torch_xla.sync()
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours.cpu(), theirs)
