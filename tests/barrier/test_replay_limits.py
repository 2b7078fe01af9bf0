"""Steps that are replayed: what a replay cannot see, and that it is said."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from probes import here
from test_replay import nothing_pending, replays  # noqa: F401
from torch import Tensor, nn

import torch_xla
from torch_xla._errors import GraphLimitError


class TestWhatAReplayCannotSee:
    def check(self, step: Callable[..., Any], said: str, capsys: pytest.CaptureFixture[str], *args: Any) -> None:
        before = replays()
        for _ in range(5):
            step(*args)
        assert replays() == before
        text = capsys.readouterr().err
        assert text.count(f"torch_xla: {step.__name__} is recorded at each call") == 1, text
        assert said in text, text

    def test_a_value_that_is_read(self) -> None:
        x = torch.ones(3).to("xla")

        @torch_xla.compile(replay=True)
        def step(x: Tensor) -> Tensor:
            return x * x.sum().item()

        line = here(-2).replace(" in test_a_value_that_is_read", "")
        step(x)
        with pytest.raises(GraphLimitError, match=r"^\[replay\] step reads a value") as raised:
            step(x)
        assert line in str(raised.value)
        assert (x + 1).tolist() == [2, 2, 2]

    def test_a_tensor_that_is_computed_already_is_read(self) -> None:
        flag = torch.ones(()).to("xla")
        step = torch_xla.compile(lambda x: x + 1 if flag else x, replay=True)
        x = torch.ones(3).to("xla")
        step(x)
        with pytest.raises(GraphLimitError, match=r"^\[replay\]"):
            step(x)

    def test_a_number_that_python_counts(self, capsys: pytest.CaptureFixture[str]) -> None:
        count = 0.5

        @torch_xla.compile(replay=True)
        def step(x: Tensor) -> Tensor:
            nonlocal count
            count += 1
            return x * count

        self.check(step, "it changes count, which is 2.5 and was 1.5", capsys, torch.ones(3).to("xla"))

    def test_a_tensor_from_outside_that_is_another(self, capsys: pytest.CaptureFixture[str]) -> None:
        source = iter([torch.ones(3).to("xla") for _ in range(9)])

        @torch_xla.compile(replay=True)
        def step() -> Tensor:
            return next(source) * 2

        self.check(step, "it depends on source, a list_iterator, which cannot be compared", capsys)

    def test_a_list_of_what_it_computes(self, capsys: pytest.CaptureFixture[str]) -> None:
        kept = []

        @torch_xla.compile(replay=True)
        def step(x: Tensor) -> Tensor:
            kept.append(x * 2)
            return x + 1

        self.check(step, "it changes kept, which has another length", capsys, torch.ones(3).to("xla"))
        assert len({t.data_ptr() for t in kept}) == 5

    def test_a_result_that_is_kept_too(self, capsys: pytest.CaptureFixture[str]) -> None:
        kept = {}

        @torch_xla.compile(replay=True)
        def step(x: Tensor) -> Tensor:
            kept["loss"] = x * 2
            return kept["loss"]

        self.check(step, "something keeps a tensor that it returns too", capsys, torch.ones(3).to("xla"))

    def test_random_numbers_of_the_host(self, capsys: pytest.CaptureFixture[str]) -> None:
        @torch_xla.compile(replay=True)
        def step(x: Tensor) -> Tensor:
            return x * 2 if random.random() < 2 else x

        self.check(step, "it draws random numbers on the host", capsys, torch.ones(3).to("xla"))

    def test_a_scheduler_inside(self, capsys: pytest.CaptureFixture[str]) -> None:
        weight = nn.Parameter(torch.ones(3).to("xla"))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)

        @torch_xla.compile(replay=True)
        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            (weight * x).sum().backward()
            optimizer.step()
            scheduler.step()

        self.check(step, "it changes scheduler.", capsys, torch.ones(3).to("xla"))

    def test_an_optimizer_whose_numbers_depend_on_a_count(self, capsys: pytest.CaptureFixture[str]) -> None:
        weight = nn.Parameter(torch.ones(3).to("xla"))
        optimizer = torch.optim.Adagrad([weight], lr=0.5, lr_decay=0.1)

        @torch_xla.compile(replay=True)
        def step(x: Tensor) -> None:
            optimizer.zero_grad()
            (weight * x).sum().backward()
            optimizer.step()

        self.check(
            step, "it changes optimizer.state[...]['step'], which has other values", capsys, torch.ones(3).to("xla")
        )

    def test_a_backward_pass_through_a_result(self) -> None:
        weight = nn.Parameter(torch.ones(3).to("xla"))

        @torch_xla.compile(replay=True)
        def step(x: Tensor) -> Tensor:
            weight.grad = None
            loss = (weight * x).sum()
            loss.backward()
            return loss

        x, before = torch.ones(3).to("xla"), replays()
        for _ in range(5):
            loss = step(x)
        assert replays() - before == 2 and loss.requires_grad and loss.item() == 3
        with pytest.raises(RuntimeError, match=r"\[replay\] backward was called on a result"):
            loss.backward()
