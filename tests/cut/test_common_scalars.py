"""Equal numbers of an optimizer or of equal layers travel as one, so that XLA compiles equal kernels once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torch_xla
from torch_xla import _bindings
from torch_xla._core.compile import cache
from torch_xla.debug import retrace

pytestmark = pytest.mark.usefixtures("idle", "nothing_compiled")


def state(count: int) -> list[Tensor]:
    made = [torch.arange(6.0).to("xla") + k for k in range(count)]
    torch_xla.sync()
    return made


def pending() -> list[float]:
    """The real numbers of what is pending, as its program gets them."""
    floats, ints, *_ = _bindings.Cut.of_device(0).preview().packed_numbers()
    return floats.tolist() + ints.tolist()


def scale(tensors: list[Tensor], *factors: float) -> None:
    for i, tensor in enumerate(tensors):
        tensor.mul_(factors[i % len(factors)])
    torch_xla.sync()


def layers(count: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(count))).to("xla")
    torch_xla.sync()
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler) -> None:
    x = torch.ones(2, 3).to("xla")
    for _ in range(5):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
        schedule.step()
        torch_xla.sync()


class TestWhichTravelAsOne:
    def test_equal_ones(self) -> None:
        tensors = state(8)
        for i, tensor in enumerate(tensors):
            tensor.mul_(0.5 if i % 2 else 0.25)
        assert pending() == [0.25, 0.5]

    @pytest.mark.parametrize(("count", "number"), [(3, 0.5), (4, 0.0), (4, 7)], ids=["few", "zeros", "whole numbers"])
    def test_not_these(self, count: int, number: float) -> None:
        tensors = state(count)
        for tensor in tensors:
            tensor.mul_(number)
        assert pending() == [number] * count

    def test_not_those_of_other_operators_or_in_other_places(self) -> None:
        tensors = state(4)
        for tensor in tensors:
            tensor.mul_(0.5).div_(0.5).mul_(0.5).sub_(tensor, alpha=0.5)
        assert pending() == [0.5] * 4

    def test_those_of_an_optimizer(self) -> None:
        model = layers(5)
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        model(torch.ones(2, 3, device="xla")).sum().backward()
        optimizer.step()
        assert len(pending()) == 2 + 7  # of the gradient of a sum, and of an update
        torch_xla.sync()


class TestWhenTheyDiffer:
    def test_another_program_once(self, compiles) -> None:
        tensors = state(6)
        expected = [tensor.cpu() for tensor in tensors]
        steps = [(0.5,), (0.75,), (0.5, 0.25, 2.0), (0.25,), (4.0, 0.5), (0.125, 4.0, 2.0, 8.0)]
        with compiles(1):
            for factors in steps[:2]:
                scale(tensors, *factors)
        with compiles(1):
            for factors in steps[2:]:
                scale(tensors, *factors)
        for factors in steps:
            expected = [e * factors[i % len(factors)] for i, e in enumerate(expected)]
        assert all(t.cpu().equal(e) for t, e in zip(tensors, expected, strict=True))

    def test_only_those_that_differ(self) -> None:
        tensors = state(4)
        for factors, expected in (((3.0, 3.0), [3.0, 0.5]), ((3.0, 2.0), [3.0, 0.5, 2.0, 3.0, 2.0])):
            for tensor, factor in zip(tensors, factors * 2, strict=True):
                tensor.mul_(factor).add_(0.5)
            cut = _bindings.Cut.of_device(0).preview()
            cache.find(cut)
            assert cut.packed_numbers()[0].tolist() == expected
            del cut
            torch_xla.sync()

    def test_equal_by_accident_does_no_harm(self, compiles) -> None:
        tensors = state(5)
        with compiles(1):
            scale(tensors, 0.5, 0.25, 2.0, 4.0, 3.0)
            scale(tensors, 0.5)
            scale(tensors, 0.5, 0.25, 2.0, 4.0, 3.0)

    def test_it_is_told_why(self, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XLA_NOTICES", "all")
        retrace.clear()
        tensors = state(5)
        for factors in ((0.5,), (0.5, 0.25)):
            scale(tensors, *factors)
        result = retrace.records()[-1]
        (difference,) = result.differences
        assert difference.kind == "numbers"
        assert difference.text.startswith("numbers of aten.mul.Tensor that were equal are 0.5 and 0.25; each is")
        assert str(difference) in capfd.readouterr().err

    def test_a_schedule_that_begins_at_zero(self, compiles) -> None:
        model = layers(4)
        groups = [{"params": layer.parameters(), "lr": 0.1 * (i + 1)} for i, layer in enumerate(model)]
        optimizer = torch.optim.SGD(groups)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step, 3) / 3)
        with compiles(1):
            train(model, optimizer, schedule)

    def test_settings_that_are_equal_by_chance(self, compiles) -> None:
        model = layers(3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.01, betas=(0.9, 0.999))
        assert 1 - 0.1 * 0.01 == 0.999  # both are factors of `mul_`
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        with compiles(1):
            train(model, optimizer, schedule)

    def test_each_program_is_kept_on_disk(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiles) -> None:
        monkeypatch.setattr(cache, "_folder", None)
        monkeypatch.setattr(cache, "_readonly", False)
        cache.clear()
        cache.initialize(str(tmp_path))

        def program() -> list[Tensor]:
            tensors = state(5)
            for factors in ((0.5,), (0.5, 0.25), (2.0,), (0.25, 3.0)):
                scale(tensors, *factors)
            return [t.cpu() for t in tensors]

        with compiles():
            expected = program()
        cache.clear()
        with compiles(0):
            got = program()
        assert all(a.equal(b) for a, b in zip(got, expected, strict=True))
        cache.clear()

    def test_values_on_the_host(self) -> None:
        for factors in ((3.0, 3.0, 3.0, 3.0, 5.0), (3.0, 5.0, 5.0, 5.0, 5.0)):
            made = [torch.ones((), device="xla") * factor for factor in factors]
            assert torch.stack(made).tolist() == list(factors)
