"""Indices and labels out of range: no kernel follows them, and values are the same by operator and compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import trusting
from probes import setting
from torch import Tensor

import torch_xla
from torch_xla import _bindings, _config

F = torch.nn.functional


@pytest.mark.sweep
@pytest.mark.slow
def test_those_that_leave_their_memory_are_known() -> None:
    assert trusting.deaths(trusting.calls()) == set(_bindings.unchecked_index_operators())


@pytest.mark.costs("a process for each of many calls")
def test_some_of_those_that_leave_their_memory_are_known() -> None:
    result = trusting.deaths(trusting.calls(of=64))
    assert result and result <= set(_bindings.unchecked_index_operators())


def _i(like: Tensor, *values: int) -> Tensor:
    return torch.tensor(values).to(like.device)


def _bag(x: Tensor, bad: int, mode: str, offset: int = 2, frequent: bool = False) -> Tensor:
    rows, offsets = _i(x, 0, 1, bad, 2), _i(x, 0, offset, 3)
    return F.embedding_bag(rows, x, offsets, mode=mode, scale_grad_by_freq=frequent)


LOSSES: dict[str, tuple[tuple[int, ...], Callable[[Tensor, int], Tensor]]] = {
    "labels": ((4, 5), lambda x, bad: F.cross_entropy(x, _i(x, 0, 1, bad, 2), reduction="none")),
    "labels, mean": ((4, 5), lambda x, bad: F.cross_entropy(x, _i(x, 0, 1, bad, 2))),
    "labels of an image": (
        (2, 5, 3, 3),
        lambda x, bad: F.cross_entropy(x, _i(x, bad, 1).view(2, 1, 1).expand(2, 3, 3), reduction="none"),
    ),
    "label of a row": ((5,), lambda x, bad: F.cross_entropy(x, _i(x, bad)[0])),
    "ignored label": ((4, 5), lambda x, bad: F.cross_entropy(x, _i(x, 0, 1, bad, 2), ignore_index=bad)),
    "margin": ((4, 5), lambda x, bad: F.multi_margin_loss(x, _i(x, 0, 1, bad, 2))),
    "embedding": ((5, 3), lambda x, bad: F.embedding(_i(x, 0, 1, bad, 2), x)),
    "embedding by frequency": ((5, 3), lambda x, bad: F.embedding(_i(x, 0, 1, bad, 2), x, scale_grad_by_freq=True)),
    "bag, sum": ((5, 3), lambda x, bad: _bag(x, bad, "sum")),
    "bag, mean": ((5, 3), lambda x, bad: _bag(x, bad, "mean")),
    "bag, max": ((5, 3), lambda x, bad: _bag(x, bad, "max")),
    "bag by frequency": ((5, 3), lambda x, bad: _bag(x, bad, "sum", frequent=True)),
    "gather": ((4, 5), lambda x, bad: x.gather(1, _i(x, 0, 1, bad, 2)[:, None])),
    "take": ((4, 5), lambda x, bad: x.take(_i(x, 0, 1, bad, 2))),
    "unpool": ((1, 1, 2, 2), lambda x, bad: F.max_unpool2d(x, _i(x, 0, 1, bad, 2).view(1, 1, 2, 2), 2, 2)),
    "alignment": (
        (6, 1, 5),
        lambda x, bad: F.ctc_loss(x.log_softmax(2), _i(x, 1, bad, 2)[None], torch.tensor([6]), torch.tensor([3])),
    ),
}


def _gradient(name: str, bad: int, device: str = "xla") -> Tensor:
    shape, loss = LOSSES[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    loss(x, bad).sum().backward()
    assert x.grad is not None
    return x.grad.cpu()


@pytest.mark.by_default("kernels are what this is about")
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_the_program(name: str, when_hot: None) -> None:
    numbers = (1_000_000, 5, -1)
    by_operator = [_gradient(name, bad) for bad in numbers]
    with setting(_config.XLA_HOST_COMPUTE, "never"):
        compiled = [_gradient(name, bad) for bad in numbers]
    torch.testing.assert_close(by_operator, compiled, equal_nan=True)


@pytest.mark.by_default("kernels are what this is about")
def test_a_label_beside_the_last_harms_no_other_row(when_hot: None) -> None:
    def gradient(device: str, rows: list[int]) -> Tensor:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
        labels = torch.tensor([0, 1, 5, 2])[rows].to(device)
        F.cross_entropy(x[rows] if rows != [0, 1, 2, 3] else x, labels, reduction="none").sum().backward()
        assert x.grad is not None
        return x.grad.cpu()

    torch.testing.assert_close(gradient("xla", [0, 1, 2, 3])[[0, 1, 3]], gradient("cpu", [0, 1, 3])[[0, 1, 3]])


def test_places_of_maxima_that_are_nowhere_are_dropped() -> None:
    """Where a program calls the CPU's kernel too, which it does for so many values."""
    x = torch.randn(1, 2, 128, 128)
    out, indices = F.max_pool2d(x, 2, return_indices=True)
    strays = indices.clone()
    strays[0, 0, 0, :2] = torch.tensor([2**40, -1])
    backward = torch.ops.aten.max_pool2d_with_indices_backward
    rest = ([2, 2], [2, 2], [0, 0], [1, 1], False)
    want = backward(
        torch.ones_like(out).flatten().index_fill(0, torch.tensor([0, 1]), 0).view_as(out), x, *rest, indices
    )
    result = backward(torch.ones_like(out).to("xla"), x.to("xla"), *rest, strays.to("xla"))
    torch_xla.sync()
    torch.testing.assert_close(result.cpu(), want)
