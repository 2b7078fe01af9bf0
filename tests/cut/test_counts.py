"""How often a training loop compiles and copies: once per loop, and one small vector of numbers per step at most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from conftest import Counting
from probes import _count, sampled
from torch import nn

import torch_xla
from torch_xla._core.compile import cache

STEPS = 10

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}


@dataclass
class Loop:
    """A small training loop; `copies` gets the number of copies to the device of each step."""

    make: Make
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    clip: float | None = None
    accumulate: int = 1
    to_none: bool = True
    read: bool = False
    copies: list[int] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)

    def run(self, device: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
        optimizer = self.make(model.parameters())
        scheduler = self.schedule(optimizer) if self.schedule else None
        inputs = [torch.randn(5, 8).to(device) for _ in range(self.accumulate)]
        labels = [torch.randint(4, (5,)).to(device) for _ in range(self.accumulate)]
        torch_xla.sync(wait=True)
        self.losses.clear()
        for _ in range(STEPS):
            before = _count("TransferToDeviceTime")
            optimizer.zero_grad(set_to_none=self.to_none)
            for x, y in zip(inputs, labels, strict=True):
                loss = nn.functional.cross_entropy(model(x), y) / float(self.accumulate)
                loss.backward()
            if self.clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), self.clip)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            torch_xla.sync()
            self.losses.append(loss.item() if self.read else loss.detach())
            self.copies.append(_count("TransferToDeviceTime") - before)
        return [float(loss) for loss in self.losses]

    def check(self, compiles: Counting, copies: int) -> None:
        """One compile in the loop, nothing read, at most so many copies a step, and the CPU's losses."""
        cache.clear()
        with compiles(1), sampled("TransferFromDeviceTime") as read:
            losses = self.run("xla")
        # The losses are read once at the end, whether in the loop or after it.
        assert read.value == STEPS
        assert max(self.copies[1:]) <= copies, self.copies
        assert losses == pytest.approx(Loop.run(self, "cpu"), rel=1e-3)


def warm_up(optimizer: torch.optim.Optimizer) -> Any:
    """From a rate of 0 up, then down."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step / 4, 1 - step / 20))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_rate_that_changes_every_step(name: str, compiles: Counting) -> None:
    Loop(OPTIMIZERS[name], schedule=warm_up).check(compiles, copies=1)


# Adam's bias correction is a number that changes.
@pytest.mark.parametrize(("name", "copies"), [("sgd", 0), ("momentum", 0), ("adamw", 1)])
def test_a_constant_rate(name: str, copies: int, compiles: Counting) -> None:
    Loop(OPTIMIZERS[name]).check(compiles, copies)


@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw"])
class TestLoops:
    def test_clipped_gradients(self, name: str, compiles: Counting) -> None:
        Loop(OPTIMIZERS[name], clip=0.5, schedule=warm_up).check(compiles, copies=1)

    def test_accumulated_gradients(self, name: str, compiles: Counting) -> None:
        Loop(OPTIMIZERS[name], accumulate=2, schedule=warm_up).check(compiles, copies=1)

    def test_the_loss_is_read_at_every_step(self, name: str, compiles: Counting) -> None:
        Loop(OPTIMIZERS[name], read=True).check(compiles, copies=1)


def test_gradients_that_are_set_to_zero(compiles: Counting) -> None:
    cache.clear()
    loop = Loop(OPTIMIZERS["momentum"], to_none=False)
    with compiles() as count:
        losses = loop.run("xla")
    # The first step has no gradients to add to.
    assert count.value <= 2
    assert losses == pytest.approx(loop.run("cpu"), rel=1e-3)


def test_a_view_that_is_written_at_every_step(compiles: Counting) -> None:
    cache.clear()
    x = torch.zeros(3, 2).to("xla")
    view = x.t()
    torch_xla.sync()
    with compiles() as count:
        for _ in range(6):
            view.add_(1.5)
            torch_xla.sync()
    assert x.tolist() == [[9.0] * 2] * 3
    # The first step may see the view as it was made.
    assert count.value <= 2


def test_a_loop_without_copies_reads_and_compiles(compiles: Counting) -> None:
    x = torch.linspace(0, 1, 50).reshape(5, 10).to("xla")
    weight = torch.eye(10).to("xla")

    def step() -> None:
        weight.sub_((x @ weight).t() @ x.sum(1, keepdim=True) * 0.01)
        torch_xla.sync()

    step()
    with compiles(0), sampled("TransferToDeviceTime", 0), sampled("TransferFromDeviceTime", 0):
        for _ in range(STEPS):
            step()


def test_a_loss_that_is_read_before_the_barrier_costs_one_more_graph(compiles: Counting) -> None:
    cache.clear()
    x = torch.linspace(-1, 1, 4000).reshape(40, 100).to("xla")
    model = nn.Linear(100, 200).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch_xla.sync()
    counts = []
    for _ in range(4):
        with compiles() as count, sampled("TransferFromDeviceTime", 1):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            assert loss.item() > 0
            torch_xla.sync()
        counts.append(count.value)
    assert counts == [2, 0, 0, 0]


def test_what_stays_pending_at_a_read_is_not_computed_again(compiles: Counting) -> None:
    """As the cache of a beam search, which is put in another order after what is read in each turn."""
    cache.clear()
    order = torch.tensor([2, 0, 1])
    start = torch.linspace(-1, 1, 300).reshape(3, 100)

    def turn(state: torch.Tensor, order: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for _ in range(15):
            state = torch.sin(state + 1)
        return state.index_select(0, order), state.sum()

    expected, there, state = start, order.to("xla"), start.to("xla")
    torch_xla.sync()
    with compiles(2):  # the first turn takes nothing up
        for _ in range(6):
            expected, total = turn(expected, order)
            state, read = turn(state, there)
            torch.testing.assert_close(read.item(), total.item(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.cpu(), expected)


def test_a_read_beside_zeros_is_compiled_once(compiles: Counting, counted: Counting) -> None:
    cache.clear()
    zeros, x = torch.zeros(8, device="xla"), torch.rand(4).to("xla")
    for _ in range(30):
        x = torch.sin(x)
    with compiles(1), counted("CreateCompileHandles", 1):
        assert x.sum().item() > 0 == zeros.storage_offset()


def test_an_evaluation_and_a_training_graph_in_turn(compiles: Counting) -> None:
    cache.clear()
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 40).reshape(5, 8).to("xla")
    torch_xla.sync()
    with compiles(2):
        for _ in range(4):
            model.train()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            torch_xla.sync()
            model.eval()
            with torch.no_grad():
                output = model(x)
            torch_xla.sync()
    assert output.isfinite().all()


def test_the_last_smaller_batch_compiles_once_more(compiles: Counting) -> None:
    cache.clear()
    model = nn.Linear(8, 4).to("xla")
    optimizer = torch.optim.AdamW(model.parameters())
    torch_xla.sync()
    with compiles(2):
        for _ in range(2):
            for size in (5, 5, 3):
                optimizer.zero_grad()
                model(torch.ones(size, 8).to("xla")).square().mean().backward()
                optimizer.step()
                torch_xla.sync()
