"""Kernels compute a call as PyTorch's settings were when it was recorded, whatever they are when its graph runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from conftest import Counting
from probes import of_pytorch, setting

import torch_xla
from torch_xla import _config

pytestmark = [pytest.mark.by_default("kernels are what these tests are about"), pytest.mark.usefixtures("when_hot")]


# Whole numbers, and a mask, become floating ones by: a division, a function, a number beside them, a number alone.
PROMOTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "division": lambda x: x / 7,
    "division by itself": lambda x: x / (x + 3),
    "of a mask": lambda x: (x > 1) / 3,
    "unary": lambda x: x.sqrt(),
    "binary": lambda x: torch.atan2(x, x + 1),
    "number": lambda x: x * 0.1,
    "mask and number": lambda x: (x > 1) * 0.1,
    "complex number": lambda x: x * 0.1j,
    "comparison": lambda x: x + 16777212 > 16777216.5,
    "comparison of a mask": lambda x: (x > 1) < 0.9999,
    "power": lambda x: x**0.3,
    "where": lambda x: torch.where(x > 2, x, 0.1),
    "where of numbers": lambda x: torch.where(x > 2, 0.1, 0.7),
    "clamp": lambda x: x.clamp(0.1, 2.7),
    "sum of a list": lambda x: torch.stack([x, x + 1]) / 3,
    "mean": lambda x: torch.mean(x, dtype=torch.float32),
    "fill": lambda x: torch.full_like(x, 16777217.0),
    "masked fill": lambda x: x.masked_fill(x > 2, 16777217.0),
    "range": lambda x: torch.arange(0, 1, 0.1, device=x.device),
    "line": lambda x: torch.linspace(0, 1, 7, device=x.device),
    "types of memory": lambda x: x.int().view(torch.float32),
    "floating": lambda x: x.double() * 0.1 + x.float() / 3,
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize("then", DTYPES)
@pytest.mark.parametrize("later", DTYPES)
def test_the_default_dtype(then: torch.dtype, later: torch.dtype, counted: Counting) -> None:
    x = torch.arange(8)
    on_device = x.to("xla")
    with of_pytorch("default_dtype", then):
        expected = {name: function(x) for name, function in PROMOTIONS.items()}
        results = {name: function(on_device) for name, function in PROMOTIONS.items()}
    with of_pytorch("default_dtype", later), counted("OperatorsByRule", 0):
        torch_xla.sync(wait=True)
        values = {name: value.cpu() for name, value in results.items()}
    for name, value in expected.items():
        torch.testing.assert_close(
            values[name], value, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_default_dtype_changes_while_the_worker_runs() -> None:
    x, big = torch.arange(1, 1001), torch.randn(700, 700)
    a, on_device = big.to("xla"), x.to("xla")
    for _ in range(20):
        a = a @ a * 1e-3
    results = [on_device / 7, on_device.sqrt(), on_device < 0.3]
    torch_xla.sync()
    with of_pytorch("default_dtype", torch.bfloat16):
        torch_xla.sync(wait=True)
    for value, want in zip(results, (x / 7, x.sqrt(), x < 0.3), strict=True):
        torch.testing.assert_close(value.cpu(), want, rtol=0, atol=0)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("hot", [True, False])
def test_deterministic_algorithms_give_the_same_bits_each_time(hot: bool, counted: Counting) -> None:
    first, x = torch.randn(64, 64), torch.randn(64, 64).to("xla")

    def program() -> list[torch.Tensor]:
        weight, result = first.to("xla"), []
        for i in range(6):
            y = torch.softmax(torch.tanh(x @ weight), -1)
            spread = (y * y).mean() + y.std()
            weight.mul_(0.99).add_(y, alpha=0.1)
            result.append(spread.cpu())  # first by itself; without the mode with all of the step, once that is known
            late = y.exp().sum(0) / (3 + i)
            if i % 2:
                torch_xla.sync()
            result.append(late.cpu())
        return [*result, weight.cpu()]

    nothing = counted("UncompiledRun", 0), counted("HostCompute", 0)
    with setting(_config.XLA_HOST_COMPUTE, "new" if hot else "reads"), deterministic(), nothing[0], nothing[1]:
        runs = [program() for _ in range(4)]
    for run in runs[1:]:
        assert all(torch.equal(*pair) for pair in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("at_the_call", [True, False])
def test_deterministic_algorithms_are_those_of_the_call(at_the_call: bool, counted: Counting) -> None:
    x, indices = torch.zeros(4).to("xla"), torch.tensor([0, 1, 0]).to("xla")
    torch_xla.sync()
    torch.use_deterministic_algorithms(at_the_call)
    try:
        y = x.index_put((indices,), torch.ones(3).to("xla"), accumulate=True)
        torch.use_deterministic_algorithms(not at_the_call)
        with counted("OperatorsByRule", int(at_the_call)):
            assert y.tolist() == [2, 1, 0, 0]
    finally:
        torch.use_deterministic_algorithms(False)


def test_products_are_as_exact_as_at_the_barrier() -> None:
    a = torch.randn(500, 500)
    x, y = a.to("xla"), a
    for _ in range(12):
        x, y = x @ x * 0.03, y @ y * 0.03
    torch_xla.sync()
    with of_pytorch("float32_matmul_precision", "medium"):  # 16-bit products, where the machine has some
        torch_xla.sync(wait=True)
    torch.testing.assert_close(x.cpu(), y, rtol=1e-3, atol=1e-4 * y.abs().max().item())
