"""Gradients, and gradients of gradients, against differences of values: `torch.autograd.gradcheck`, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

Call = Callable[..., Any]


def layer(made: nn.Module) -> nn.Module:
    return made.double().to("xla")


def written(x: Tensor) -> Tensor:
    y = x.clone()
    y[1:].mul_(y[:-1].clone())
    return y


def put(x: Tensor, values: Tensor) -> Tensor:
    return x.clone().index_put((torch.tensor([0, 0], device="xla"),), values, accumulate=True)


def solution(x: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.solve(x @ x.mT + 3 * torch.eye(3, dtype=x.dtype, device=x.device), b)


def recurrent() -> Call:
    lstm = layer(nn.LSTM(2, 3))
    return lambda x: lstm(x)[0]


CASES: dict[str, tuple[Callable[[], Call], tuple[tuple[int, ...], ...]]] = {
    "products that cancel": (lambda: lambda a, b, c: -((-(a * b * b)) * c * 10), ((4,), (4,), (4,))),
    "matmul": (lambda: torch.matmul, ((3, 4), (4, 2))),
    "log_softmax": (lambda: lambda x: x.log_softmax(-1), ((3, 4),)),
    "layer norm": (lambda: layer(nn.LayerNorm(4)), ((3, 4),)),
    "batch norm": (lambda: layer(nn.BatchNorm1d(3)), ((4, 3),)),
    "convolution": (lambda: layer(nn.Conv2d(2, 3, 3, padding=1)), ((1, 2, 4, 4),)),
    "lstm": (recurrent, ((3, 1, 2),)),
    "cumprod": (lambda: lambda x: x.cumprod(0), ((4,),)),
    "solve": (lambda: solution, ((3, 3), (3, 1))),
    "written to a view": (lambda: written, ((4,),)),
    "index_put": (lambda: put, ((3,), (2,))),
    "grid_sample": (
        lambda: lambda x, g: F.grid_sample(x, g.tanh() * 0.9, align_corners=True),
        ((1, 1, 3, 3), (1, 2, 2, 2)),
    ),
}


def inputs(shapes: tuple[tuple[int, ...], ...]) -> tuple[Tensor, ...]:
    return tuple(torch.randn(shape, dtype=torch.float64).to("xla").requires_grad_() for shape in shapes)


@pytest.mark.parametrize(("make", "shapes"), CASES.values(), ids=CASES.keys())
def test_gradients_are_slopes(make: Callable[[], Call], shapes: tuple[tuple[int, ...], ...]) -> None:
    call, given = make(), inputs(shapes)
    assert gradcheck(call, given, fast_mode=True)
    assert gradgradcheck(call, given, fast_mode=True)


def test_attention_whose_result_is_not_used() -> None:
    qkv = inputs(((1, 1, 3, 2),) * 3)
    assert gradcheck(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), qkv, fast_mode=True)
