"""A graph of what was recorded before some point, while the rest stays pending."""

from __future__ import annotations

import random

import pytest
import torch

import torch_xla
from torch_xla import _bindings, _metrics
from torch_xla._core.device import transfer
from torch_xla._core.execute import pipeline, plan
from torch_xla._core.graph import graph


def run_until(sequence: int) -> None:
    pipeline.run(_bindings.Cut.of_device(0, sequence), "test", False)


def pending_ops() -> list[str]:
    return [node.op for node in graph.describe(_bindings.Cut.of_device(0).preview()).nodes]


@pytest.fixture
def x() -> torch.Tensor:
    x = torch.arange(6.0, device="xla").reshape(2, 3).clone()
    torch_xla.sync()
    return x


def test_only_what_was_recorded_before(x: torch.Tensor) -> None:
    y = x.sin()
    until = _bindings.node_sequence()
    z = y.cos()
    run_until(until)
    assert pending_ops() == ["aten.cos.default"]
    assert torch.equal(z.cpu(), y.cpu().cos())


def test_a_question_changes_nothing(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "fill", lambda *_: pytest.fail("a question gave a fill its buffer"))
    state, row = torch.zeros(3, device="xla"), x[0]
    y = row + state
    cut, before = _bindings.Cut.of_device(0), _bindings.node_sequence()
    assert len({cut.question().key for _ in range(3)}) == 1
    assert plan.has_run_before(cut) is False and _bindings.has_pending(0)
    z = row * 2
    assert _bindings.node_sequence() == before + 1  # the view is known as before
    monkeypatch.undo()
    torch_xla.sync()
    assert y.tolist() == [0, 1, 2] and z.tolist() == [0, 2, 4]


def test_a_value_that_only_later_calls_need(x: torch.Tensor) -> None:
    y = x.sin()
    z = y.exp()
    until = _bindings.node_sequence()
    z = z.cos()
    del y
    cut = _bindings.Cut.of_device(0, until).preview()
    assert [node.op for node in graph.describe(cut).nodes] == ["aten.sin.default", "aten.exp.default"]
    assert cut.num_outputs == 1
    run_until(until)
    assert pending_ops() == ["aten.cos.default"]
    torch.testing.assert_close(z.cpu(), x.cpu().sin().exp().cos())


def test_a_tensor_that_was_overwritten_since(x: torch.Tensor) -> None:
    x.add_(1)
    until = _bindings.node_sequence()
    x.mul_(3)
    run_until(until)
    assert pending_ops() == ["aten.mul.Tensor"]
    torch_xla.sync()
    assert x.tolist() == [[3, 6, 9], [12, 15, 18]]


def test_views_and_writes_through_them(x: torch.Tensor) -> None:
    row = x[0]
    row.add_(10)
    until = _bindings.node_sequence()
    x[1] = row * 2
    row.sub_(1)
    run_until(until)
    torch_xla.sync()
    assert x.tolist() == [[9, 10, 11], [20, 22, 24]]
    assert row.tolist() == [9, 10, 11]


def test_nothing_before(x: torch.Tensor) -> None:
    until = _bindings.node_sequence()
    y = x + 1
    with_nothing = _metrics.counter("UncachedCompile") or 0
    run_until(until)
    assert (_metrics.counter("UncachedCompile") or 0) == with_nothing
    assert pending_ops() == ["aten.add.Tensor"]
    assert y.sum().item() == 21


def test_chosen_tensors_have_no_until(x: torch.Tensor) -> None:
    with pytest.raises(TypeError):
        _bindings.Cut.of_tensors([x], until=1)  # type: ignore[call-arg]


CALLS = [
    lambda ts, i, j: ts[i].add_(ts[j]),
    lambda ts, i, j: ts[i].mul_(0.5),
    lambda ts, i, j: ts[i][j].copy_(ts[j][0]),
    lambda ts, i, j: ts.__setitem__(i, ts[j].sin()),
    lambda ts, i, j: ts.__setitem__(i, ts[j].t()),
    lambda ts, i, j: ts.__setitem__(i, torch.zeros(3, 3, device=ts[j].device)),
    lambda ts, i, j: ts[i].t()[1].sub_(1),
    lambda ts, i, j: ts.__setitem__(i, torch.stack(ts[j].unbind(1))),
    lambda ts, i, j: ts[i].fill_(2),
    lambda ts, i, j: ts[i].set_(ts[j]) if i != j else None,
]


@pytest.mark.parametrize("seed", range(12))
def test_random_programs_cut_anywhere(seed: int) -> None:
    """Cut at random points, some of them twice or out of order, a program gives what it gives on CPU."""
    chosen = random.Random(seed)
    start = torch.randn(4, 3, 3)
    tensors = {device: [t.clone().to(device) for t in start] for device in ("cpu", "xla")}
    points: list[int] = []
    for _ in range(40):
        call, i, j = chosen.choice(CALLS), chosen.randrange(3), chosen.randrange(3)
        for ts in tensors.values():
            call(ts, i, j)
        points.append(_bindings.node_sequence())
        if chosen.random() < 0.15:
            run_until(chosen.choice(points))
        if chosen.random() < 0.03:
            torch_xla.sync()
    for ours, cpu in zip(tensors["xla"], tensors["cpu"], strict=True):
        torch.testing.assert_close(ours.cpu(), cpu)
