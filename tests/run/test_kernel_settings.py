"""Kernels compute a call as PyTorch's settings were when it was recorded, whatever they are when its graph runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import Counting
from probes import of_pytorch

import torch_xla

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
        wanted = {name: function(x) for name, function in PROMOTIONS.items()}
        found = {name: function(on_device) for name, function in PROMOTIONS.items()}
    with of_pytorch("default_dtype", later), counted("OperatorsByRule", 0):
        torch_xla.sync(wait=True)
        values = {name: value.cpu() for name, value in found.items()}
    for name, value in wanted.items():
        torch.testing.assert_close(
            values[name], value, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_default_dtype_changes_while_the_worker_runs() -> None:
    x, big = torch.arange(1, 1001), torch.randn(700, 700)
    a, on_device = big.to("xla"), x.to("xla")
    for _ in range(20):
        a = a @ a * 1e-3
    found = [on_device / 7, on_device.sqrt(), on_device < 0.3]
    torch_xla.sync()
    with of_pytorch("default_dtype", torch.bfloat16):
        torch_xla.sync(wait=True)
    for value, want in zip(found, (x / 7, x.sqrt(), x < 0.3), strict=True):
        torch.testing.assert_close(value.cpu(), want, rtol=0, atol=0)


def test_deterministic_algorithms_have_kernels_for_all(counted: Counting) -> None:
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).to("xla")
    x = torch.randn(4, 8).to("xla")
    torch_xla.sync()
    torch.use_deterministic_algorithms(True)
    try:
        with counted("OperatorsByRule", 0):
            with torch.autocast("xla", torch.bfloat16):
                y = layers(x).float()
            torch.nn.functional.cross_entropy(y, torch.tensor([0, 1, 2, 0]).to("xla")).backward()
            torch_xla.sync(wait=True)
    finally:
        torch.use_deterministic_algorithms(False)


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
