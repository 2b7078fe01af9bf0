"""Loops as one operator of the graph."""

from __future__ import annotations

import pytest
import torch
from torch._higher_order_ops.while_loop import while_loop as torch_while_loop

import torch_xla
from torch_xla.experimental.fori_loop import fori_loop, while_loop

Tensors = tuple[torch.Tensor, ...]


def number(value: int) -> torch.Tensor:
    return torch.tensor(value).to("xla")


def test_a_loop_is_one_program_however_often_it_runs(compiles) -> None:
    factor = torch.tensor(3.0).to("xla")
    x = torch.ones(2, 2).to("xla")
    results = []
    torch_xla.sync()
    with compiles(1):
        for upper in (5, 7):
            left, y = fori_loop(number(0), number(upper), lambda v: v * factor, x)
            torch_xla.sync()
            results.append((left, y))
    assert [(left.item(), y[0, 0].item()) for left, y in results] == [(0, 3.0**5), (0, 3.0**7)]
    assert torch.equal(fori_loop(7, 5, lambda v: v * factor, x)[1].cpu(), torch.ones(2, 2))


def test_condition_and_body_use_tensors_from_outside() -> None:
    end, step = number(10), number(3)

    def body(i: torch.Tensor, total: torch.Tensor, scale: torch.Tensor) -> Tensors:
        total = total.clone()
        total += i * scale
        return i + step, total

    i, total = while_loop(lambda i, total, scale: i < end, body, (number(0), number(0)), (number(2),))
    assert (i.item(), total.item()) == (12, 2 * (0 + 3 + 6 + 9))


def test_torch_while_loop_with_a_module(counted) -> None:
    linear = torch.nn.Linear(2, 2)
    x = torch.randn(3, 2)
    with torch.no_grad():
        expected = linear(linear(linear(x)))
        linear.to("xla")
        with counted("xla::program", 1):
            _, y = torch_while_loop(lambda i, x: i > 0, lambda i, x: (i - 1, linear(x)), (number(3), x.to("xla")))
    torch.testing.assert_close(y.cpu(), expected)


def test_numbers_stay_numbers() -> None:
    i, x = torch_while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (0, torch.ones(2).to("xla")))
    assert i == 3 and x.tolist() == [8.0, 8.0]


def test_refusals() -> None:
    with pytest.raises(RuntimeError, match=r"\[while_loop\].*torch.float32\[\].*torch.int64\[\]"):
        while_loop(lambda i: i < 5, lambda i: (i + 0.5,), (number(0),))
    with pytest.raises(ValueError, match=r"\[fori_loop\]"):
        fori_loop(0, 3, lambda x: x, torch.ones(1))
