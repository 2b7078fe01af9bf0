"""Loops without a barrier where more than one thread records on a device: one that records by itself has its loop cut,
threads that record in turns are let be."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
from conftest import Counting
from probes import cuts
from torch import Tensor, nn

import torch_xla

pytestmark = pytest.mark.usefixtures("short_loops")


class Training:
    """A step has some 45 operators."""

    def __init__(self, device: str, width: int = 8) -> None:
        torch.manual_seed(width)
        self.model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 4)).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.batch = torch.randn(5, 6).to(device)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def weights(self) -> list[Tensor]:
        return [weight.detach().cpu() for weight in self.model.parameters()]


def compare(training: Training, steps: int, width: int = 8) -> None:
    expected = Training("cpu", width)
    for _ in range(steps):
        expected.step()
    torch.testing.assert_close(training.weights(), expected.weights(), rtol=1e-4, atol=1e-5)


def in_turns(works: list[Callable[[], None]], turns: list[tuple[int, int]]) -> None:
    """Gives each work a thread of its own; turns of (which, how often) say who comes when."""

    def times(work: Callable[[], None], count: int) -> None:
        for _ in range(count):
            work()

    with ExitStack() as stack:
        threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in works]
        for which, count in turns:
            threads[which].submit(times, works[which], count).result()


def test_threads_that_take_turns_are_let_be(compiles: Counting) -> None:
    first, second = Training("xla", 8), Training("xla", 12)
    before = cuts()
    with compiles(1):
        in_turns([first.step, second.step], [(0, 1), (1, 1)] * 6)
        torch_xla.sync()
    assert cuts() == before
    compare(first, 6, 8)
    compare(second, 6, 12)


def test_threads_that_take_long_turns_are_let_be_in_the_end(compiles: Counting) -> None:
    first, second = Training("xla", 8), Training("xla", 12)
    before = cuts()
    with compiles() as count:
        in_turns([first.step, second.step], [(0, 6), (1, 6)] * 5)
        made = cuts()
        in_turns([first.step, second.step], [(0, 6), (1, 6)])
        assert cuts() == made > before
        torch_xla.sync()
    assert count.value <= 8
    compare(first, 36, 8)
    compare(second, 36, 12)


def test_threads_at_the_same_time(compiles: Counting) -> None:
    trainings = [Training("xla", 8), Training("xla", 12)]
    torch_xla.sync()

    def train(training: Training) -> None:
        for _ in range(10):
            training.step()

    with compiles() as count:
        with ThreadPoolExecutor(len(trainings)) as threads:
            list(threads.map(train, trainings))
        torch_xla.sync()
    assert count.value <= 12
    compare(trainings[0], 10, 8)
    compare(trainings[1], 10, 12)


def test_another_thread_now_and_then(compiles: Counting) -> None:
    """It shows what is there, such as a mean of the weights; the loop is found again."""
    training, means = Training("xla"), []

    def look() -> None:
        means.append(training.model[0].weight.detach().mean())

    before = cuts()
    with compiles() as count:
        in_turns([training.step, look], [(0, 40), (1, 1)] * 4)
    assert cuts() - before > 130
    assert count.value <= 12
    assert len(means) == 4 and all(mean.isfinite() for mean in means)
    compare(training, 160)


def test_backward_passes_in_autograds_threads(compiles: Counting) -> None:
    training = Training("xla")

    def train() -> None:
        training.step()  # the first call in a thread asks for a backward pass in the same one
        torch.autograd.set_multithreading_enabled(True)
        for _ in range(19):
            training.step()

    before = cuts()
    with compiles() as count:
        in_turns([train], [(0, 1)])
    assert cuts() - before > 10
    assert count.value <= 4
    compare(training, 20)
