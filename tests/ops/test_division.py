"""Quotients are rounded once, as PyTorch's are, also where XLA would multiply by a reciprocal."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from agreement import exactly, on_both
from torch import Tensor

import torch_xla

pytestmark = pytest.mark.optimized("what LLVM makes of a quotient is a part of it")

Program = Callable[[Tensor], Tensor]

QUOTIENTS: dict[str, Program] = {
    "number": lambda x: x / 41.0,
    "whole number": lambda x: x / 41,
    "tensor without dimensions": lambda x: x / torch.full((), 41.0, device=x.device),
    "row": lambda x: x / torch.arange(1.0, x.shape[1] + 1, device=x.device),
    "column": lambda x: x / x.amax(1, keepdim=True),
    "in place": lambda x: x.clone().div_(41.0),
    "trunc": lambda x: torch.div(x, 41.0, rounding_mode="trunc"),
    "floor": lambda x: torch.div(x, 41.0, rounding_mode="floor"),
    "floor divide": lambda x: x // 41.0,
    "integers": lambda x: x.long() / 41,
    "addcdiv": lambda x: torch.addcdiv(torch.zeros_like(x), x, torch.full((1,), 41.0, device=x.device)),
    "mean of a row": lambda x: x.mean(1),
    "round": lambda x: x.div(8).round(decimals=1),
    "pool": lambda x: F.avg_pool1d(x, 41),
    "loss": lambda x: F.l1_loss(x, torch.zeros_like(x)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", QUOTIENTS)
def test_quotients_are_exact(name: str, dtype: torch.dtype) -> None:
    # Products with 41: sums of rows are exact in float32, and quotients are whole numbers half of the time.
    x = (torch.arange(41.0) * torch.arange(1.0, 42.0)[:, None]).to(dtype)
    if name in ("mean of a row", "pool", "loss"):
        x = torch.full_like(x, 3.0)
    got = QUOTIENTS[name](x.to("xla"))
    torch_xla.sync()  # by a compiled program, not on the host
    expected = QUOTIENTS[name](x)
    assert got.dtype == expected.dtype
    assert torch.equal(got.cpu(), expected), (got.cpu() - expected).abs().max()


@pytest.mark.parametrize("divisor", [0.0, -0.0, float("inf"), float("nan"), 1e-30])
def test_special_quotients(divisor: float) -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 3e38] * 4)
    got = x.to("xla") / divisor
    torch_xla.sync()
    expected = x / divisor
    torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    known = ~expected.isnan()
    assert torch.equal(got.cpu().signbit()[known], expected.signbit()[known])


@on_both(exactly, compiled=True)
def test_gradients_of_a_pool(device: str) -> Tensor | None:
    leaf = torch.arange(41.0).expand(2, 3, 41).contiguous().to(device).detach().requires_grad_()
    F.avg_pool1d(leaf, 41).sum().backward()
    return leaf.grad


@pytest.mark.parametrize("n", [41, 47, 97, 768])
def test_equal_values_are_their_mean(n: int) -> None:
    x = torch.ones(2, 3, n)
    normalizations: list[Program] = [
        lambda x: F.layer_norm(x, (n,)),
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: F.group_norm(x, 3),
        lambda x: F.adaptive_avg_pool1d(x, 1) - 1,
        lambda x: x.var(2),
    ]
    results = [normalize(x.to("xla")) for normalize in normalizations]
    torch_xla.sync()
    assert [result.count_nonzero().item() for result in results] == [0] * len(results)
