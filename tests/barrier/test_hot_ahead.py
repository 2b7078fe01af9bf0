"""The host records on while a graph runs operator by operator."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import Counting

import torch_xla
from torch_xla import _bindings

pytestmark = [pytest.mark.by_default("new graphs are not compiled"), pytest.mark.usefixtures("when_hot")]

numbers = torch.randn(200, 200)


def work(device: str, rounds: int) -> torch.Tensor:
    x = numbers.to(device)
    for _ in range(rounds):
        x = (x @ x).tanh()
    return x


def is_ahead() -> bool:
    return _bindings.in_flight(0).operator_run is not None


def test_results_come_when_they_are_asked_for(compiles: Counting, counted: Counting) -> None:
    with compiles(0), counted("UncompiledRun", 1):
        x = work("xla", 5)
        torch_xla.sync()
        assert is_ahead()
        torch.testing.assert_close(x.cpu(), work("cpu", 5), rtol=0, atol=0)
        assert not is_ahead()


def test_what_is_recorded_on_top_of_it() -> None:
    def program(device: str) -> list[torch.Tensor]:
        x = work(device, 6)
        part, kept = x[3:9], x * 1
        if device == "xla":
            torch_xla.sync()
            assert is_ahead()
        later = x * 2
        part.add_(1)
        x[0] = 5
        again = x[:, 1] + kept[1]
        if device == "xla":
            torch_xla.sync()
        x.mul_(0.5)
        return [t.cpu() for t in (x, part, kept, later, again)]

    torch.testing.assert_close(program("xla"), program("cpu"), rtol=0, atol=0)


def test_barriers_without_work_do_not_wait_and_those_that_are_asked_to_do() -> None:
    known = torch.ones(3).to("xla")
    torch_xla.sync(wait=True)
    x = work("xla", 7)
    torch_xla.sync()
    torch_xla.sync()
    assert known.tolist() == [1, 1, 1] and is_ahead()
    torch_xla.sync(wait=True)
    assert not is_ahead() and torch.equal(x.cpu(), work("cpu", 7))


def test_values_of_the_last_barrier_come_back_from_below_what_was_recorded_since() -> None:
    x = torch.ones(1 << 21).to("xla")
    torch_xla.sync(wait=True)
    lost, beside = (x[:, None] + x[None]).sum(1), x * 3
    x.add_(lost)
    torch_xla.sync()
    assert is_ahead()
    on_top, other = x + 1, beside + 1
    with pytest.raises(torch.OutOfMemoryError):
        torch_xla.sync()
    assert x[0].item() == 1 and beside[0].item() == 3 and other[0].item() == 4
    assert _bindings.is_lost(lost) and _bindings.is_lost(on_top)


def test_an_operator_that_may_fail_is_waited_for() -> None:
    x = work("xla", 2).erfinv().sort().values.cumsum(0)
    torch.ops.aten.normal_(y := torch.empty(200, 200, device="xla"))
    z = x + y
    torch_xla.sync()
    assert not is_ahead()
    assert z.shape == (200, 200)


def test_threads_take_turns() -> None:
    results: dict[int, torch.Tensor] = {}

    def turn(rounds: int) -> None:
        for extra in range(3):
            results[rounds] = work("xla", rounds + extra) + extra
            torch_xla.sync()
        results[rounds] = results[rounds].cpu()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(turn, (3, 5, 7)))
    for rounds, values in results.items():
        torch.testing.assert_close(values, work("cpu", rounds + 2) + 2, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_kernels_that_take_no_16_bits_beside_float32_compute_in_that(dtype: torch.dtype, counted: Counting) -> None:
    def gradients(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).to(dtype)
        x = torch.randn(2, 9, 32, dtype=dtype).to(device).requires_grad_()
        model.to(device)(x).float().square().mean().backward()
        assert x.grad is not None
        return [x.grad.cpu()]

    with counted("OperatorsByRule", 0):
        result = gradients("xla")
    torch.testing.assert_close(result, gradients("cpu"), rtol=0.05, atol=1e-3)
