"""A program that is known runs on arguments that are named, without a call recorded or a graph cut for it."""

from __future__ import annotations

import pytest
import torch

import torch_xla
from torch_xla import _bindings, _metrics
from torch_xla._core.compile import cache

SIZE = 20_000  # too large for a pack


def update(weight: torch.Tensor, gradient: torch.Tensor, rate: float) -> None:
    weight.add_(gradient, alpha=-rate)
    torch_xla.sync()


def tensors(*values: float, size: int = SIZE) -> list[torch.Tensor]:
    made = [torch.full((size,), value).to("xla") for value in values]
    torch_xla.sync()
    return made


def latest_program() -> _bindings.Program:
    return cache._executables.values()[-1].program


@pytest.fixture
def program() -> _bindings.Program:
    weight, gradient = tensors(1.0, 2.0)
    update(weight, gradient, 0.25)
    assert weight[0].item() == 0.5
    update(weight, gradient, 0.25)
    return _program_of(weight, gradient)


def _program_of(weight: torch.Tensor, gradient: torch.Tensor) -> _bindings.Program:
    update(weight, gradient, 0.125)  # used last
    return latest_program()


def test_other_tensors_and_numbers(program: _bindings.Program) -> None:
    weight, gradient = tensors(10.0, 3.0)
    compiled, recorded = _metrics.counter("UncachedCompile"), _bindings.op_counts()
    graphs = _bindings.metric("TensorsGraphSize")
    for _ in range(3):
        program.bind([weight, gradient], [-0.5], [weight]).execute()
    assert _bindings.op_counts() == recorded
    assert _bindings.metric("TensorsGraphSize") == graphs
    assert not _bindings.has_pending(0)
    assert weight.cpu().unique().tolist() == [5.5]
    assert gradient.cpu().unique().tolist() == [3.0]
    assert _metrics.counter("UncachedCompile") == compiled


def test_recording_goes_on_with_the_results(program: _bindings.Program) -> None:
    weight, gradient = tensors(10.0, 3.0)
    before = weight._version
    doubled_before = weight * 2
    torch_xla.sync()
    program.bind([weight, gradient], [1.0], [weight]).execute()
    assert weight._version == before + 1
    weight += 1
    torch_xla.sync()
    assert (weight[0].item(), weight[-1].item(), doubled_before[0].item()) == (14.0, 14.0, 20.0)


def test_views_see_the_new_value(program: _bindings.Program) -> None:
    weight, gradient = tensors(10.0, 3.0)
    view, alias = weight[5:7], weight.detach()
    assert view.tolist() == [10.0, 10.0]
    program.bind([weight, gradient], [1.0], [weight]).execute()
    assert view.tolist() == [13.0, 13.0]
    assert alias[0].item() == 13.0


def test_what_is_left_of_an_input_is_not_written_over(program: _bindings.Program) -> None:
    weight, gradient, result = tensors(10.0, 3.0, 0.0)
    program.bind([weight, gradient], [1.0], [result]).execute()
    assert (weight[0].item(), result[0].item()) == (10.0, 13.0)
    clone = weight.clone()
    torch_xla.sync()
    program.bind([weight, gradient], [1.0], [weight]).execute()
    assert (weight[0].item(), clone[0].item()) == (13.0, 10.0)
    program.bind([weight, weight], [1.0], [weight]).execute()
    assert weight[0].item() == 26.0


def test_a_call_that_reads_the_old_value_is_pending(program: _bindings.Program) -> None:
    weight, gradient = tensors(10.0, 3.0)
    doubled = weight * 2
    program.bind([weight, gradient], [1.0], [weight]).execute()
    assert (doubled[0].item(), weight[0].item()) == (20.0, 13.0)


def test_small_tensors_that_travel_together() -> None:
    weights = tensors(*map(float, range(6)), size=8)
    for _ in range(3):
        for weight in weights:
            weight.mul_(2.0)
        torch_xla.sync()
    program = latest_program()
    assert [len(leaves) for leaves, _ in program.packing.packs] == [6]
    others = tensors(*map(float, range(6)), size=8)
    for _ in range(2):
        program.bind(others, [3.0] * 6, others).execute()
    assert [other[0].item() for other in others] == [9.0 * i for i in range(6)]
    assert [weight[0].item() for weight in weights] == [8.0 * i for i in range(6)]


def test_seeds() -> None:
    x = tensors(0.0)[0]
    torch_xla.manual_seed(3)
    for _ in range(2):
        x.uniform_()
        torch_xla.sync()
    program = latest_program()
    expected = []
    for offset in range(2):
        torch_xla.manual_seed(11 + offset)
        x.uniform_()
        torch_xla.sync()
        expected.append(x.cpu())
    found = []
    for offset in range(2):
        torch_xla.manual_seed(11 + offset)
        numbers = _bindings.rng_state(0)
        program.bind([x], list(numbers), [x]).execute()
        found.append(x.cpu())
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert not torch.equal(found[0], found[1])


class TestRefused:
    def test_another_shape(self, program: _bindings.Program) -> None:
        weight, short = *tensors(1.0), *tensors(1.0, size=SIZE - 1)
        with pytest.raises(RuntimeError, match=r"^\[run\] got input 1 of another shape"):
            program.bind([weight, short], [1.0], [weight])
        with pytest.raises(RuntimeError, match=r"^\[run\] got result 0 that is a view, or of another shape"):
            program.bind([weight, weight], [1.0], [short])

    def test_another_number_of_them(self, program: _bindings.Program) -> None:
        weight = tensors(1.0)[0]
        with pytest.raises(RuntimeError, match="got 1 inputs, 1 numbers and 1 results, expected 2, 1 and 1"):
            program.bind([weight], [1.0], [weight])
        with pytest.raises(RuntimeError, match="got 0 numbers, expected 1"):
            program.bind([weight, weight], [], [weight])

    def test_a_value_that_is_pending(self, program: _bindings.Program) -> None:
        weight, gradient = tensors(1.0, 2.0)
        gradient = gradient * 2
        with pytest.raises(RuntimeError, match=r"got input 1 with a value that is pending"):
            program.bind([weight, gradient], [1.0], [weight])
        torch_xla.sync()
        program.bind([weight, gradient], [1.0], [weight]).execute()
        assert weight[0].item() == 5.0

    def test_tensors_of_another_device(self, program: _bindings.Program) -> None:
        weight = tensors(1.0)[0]
        with pytest.raises(RuntimeError, match="got input 1 on cpu"):
            program.bind([weight, weight.cpu()], [1.0], [weight])
        with pytest.raises(RuntimeError, match="got result 0 on cpu"):
            program.bind([weight, weight], [1.0], [weight.cpu()])
