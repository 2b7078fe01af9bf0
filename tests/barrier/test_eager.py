"""Eager mode: each operation runs at once and gives what lazy mode gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import Counting
from probes import sampled
from torch import Tensor, nn

import torch_xla
from torch_xla import _bindings
from torch_xla._core.compile import cache
from torch_xla.experimental import eager_mode, is_eager_mode
from torch_xla.experimental.eager import eager_mode_context


@pytest.fixture(autouse=True)
def eagerly() -> Iterator[None]:
    torch_xla.sync()
    eager_mode(True)
    yield
    eager_mode(False)


def is_computed(tensor: Tensor) -> bool:
    return _bindings.buffer_of(tensor) is not None


def train(device: str, steps: int = 3) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    x, y = torch.linspace(-1, 1, 30).reshape(5, 6).to(device), torch.tensor([0, 1, 2, 1, 0]).to(device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())]


class TestOperators:
    def test_each_runs_at_once(self) -> None:
        x = torch.linspace(0, 1, 6).to("xla")
        with sampled("EagerOpExecuteTime", 3):
            y = x * 2.5
            assert is_computed(y)
            z = y.sin()
            assert is_computed(z)
            x.add_(1.5)
            assert is_computed(x)
        assert not _bindings.has_pending(0)
        torch.testing.assert_close(z.cpu(), (torch.linspace(0, 1, 6) * 2.5).sin())
        torch.testing.assert_close(x.cpu(), torch.linspace(0, 1, 6) + 1.5)

    def test_several_results(self) -> None:
        values, indices = torch.linspace(0, 1, 6).reshape(2, 3).to("xla").max(1)
        assert is_computed(values)
        assert is_computed(indices)
        assert indices.tolist() == [2, 2]

    def test_an_operator_compiles_once_per_shape(self, compiles: Counting) -> None:
        cache.clear()
        with compiles(2):
            for size in (4, 5, 4, 5):
                torch.linspace(0, 1, size).to("xla") * (size + 0.5)

    def test_views_alias(self) -> None:
        x = torch.zeros(2, 3).to("xla")
        row = x[1]
        row.add_(2.5)
        x.t()[0] += 1
        assert x.tolist() == [[1.0, 0.0, 0.0], [3.5, 2.5, 2.5]]
        assert row.tolist() == [3.5, 2.5, 2.5]

    def test_a_value_is_read(self) -> None:
        assert (torch.arange(5, device="xla") * 3).sum().item() == 30

    def test_random_numbers_are_those_of_lazy_mode(self) -> None:
        def draw() -> list[float]:
            torch_xla.manual_seed(3)
            return [*torch.rand(3, device="xla").tolist(), *torch.randn(3, device="xla").tolist()]

        eager = draw()
        eager_mode(False)
        assert draw() == eager

    def test_an_error_comes_from_its_own_line(self) -> None:
        with pytest.raises(RuntimeError, match="size of tensor"):
            torch.ones(2, 3).to("xla") + torch.ones(2, 4).to("xla")
        assert (torch.ones(2).to("xla") + 1).tolist() == [2.0, 2.0]

    def test_on_another_device(self) -> None:
        x = torch.ones(3).to("xla:1") * 2.5
        assert is_computed(x)
        assert (x.device, x.tolist()) == (torch.device("xla:1"), [2.5] * 3)


class TestTraining:
    @pytest.mark.costs("each operator is a program")
    def test_it_agrees_with_cpu_and_lazy_mode(self) -> None:
        eager = [value.cpu() for value in train("xla")]
        eager_mode(False)
        lazy = [value.cpu() for value in train("xla")]
        for mine, other, expected in zip(eager, lazy, train("cpu"), strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-5)
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)

    def test_gradients_are_computed_at_once(self) -> None:
        x = torch.linspace(0, 1, 6).to("xla").requires_grad_()
        x.square().sum().backward()
        assert x.grad is not None
        assert is_computed(x.grad)
        torch.testing.assert_close(x.grad.cpu(), 2 * torch.linspace(0, 1, 6))

    def test_later_steps_compile_nothing(self, compiles: Counting) -> None:
        train("xla")
        with compiles(0):
            train("xla", 5)


class TestRegions:
    def test_a_compiled_function_is_one_graph(self, compiles: Counting) -> None:
        cache.clear()

        @torch_xla.compile
        def step(x: Tensor) -> Tensor:
            assert not is_eager_mode()
            y = (x * 2.5).sin()
            assert not is_computed(y)
            return y.sum()

        x = torch.linspace(0, 1, 6).to("xla")
        with compiles(1), sampled("ExecuteTime", 3):
            results = [step(x) for _ in range(3)]
        assert is_eager_mode()
        assert is_computed(results[0])
        torch.testing.assert_close(results[0].cpu(), (torch.linspace(0, 1, 6) * 2.5).sin().sum())

    def test_an_error_inside_leaves_the_mode_as_it_was(self) -> None:
        with pytest.raises(KeyError), torch_xla.compile():
            raise KeyError
        assert is_eager_mode()

    def test_a_training_step(self) -> None:
        def losses(device: str, wrap: Callable[..., Any]) -> list[float]:
            torch.manual_seed(0)
            model = nn.Linear(4, 2).to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            x = torch.linspace(-1, 1, 12).reshape(3, 4).to(device)

            def step() -> Tensor:
                optimizer.zero_grad()
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                return loss

            step = wrap(step)
            return [step().item() for _ in range(4)]

        assert losses("xla", torch_xla.compile) == pytest.approx(losses("cpu", lambda f: f), rel=1e-4)


class TestSwitch:
    @pytest.mark.compiled("it asks whether a program has run")
    def test_back_to_lazy(self) -> None:
        assert is_eager_mode()
        eager_mode(False)
        assert not is_eager_mode()
        x = torch.ones(40_000).to("xla") * 2.5
        assert not is_computed(x)
        eager_mode(True)
        assert is_computed(x)

    def test_for_a_block(self) -> None:
        with eager_mode_context(False) as before:
            assert before
            assert not is_eager_mode()
            x = torch.ones(3).to("xla") * 2.5
            assert not is_computed(x)
        assert is_eager_mode()
        assert is_computed(x)

    def test_for_a_block_that_fails(self) -> None:
        with pytest.raises(KeyError), eager_mode_context(False):
            raise KeyError
        assert is_eager_mode()
