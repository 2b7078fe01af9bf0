"""Running sums, products and extremes."""

from __future__ import annotations

import math

import pytest
import torch
from harness import check

A = torch.ops.aten
X = torch.randn(3, 4)
TIES = torch.tensor([[1.0, 1.0, 0.0, 2.0, 2.0], [0.0, math.nan, 5.0, math.nan, 1.0], [-math.inf] * 5])
OPERANDS = [X, X.bfloat16(), torch.randint(-3, 4, (3, 4)), X > 0, torch.zeros(0, 4), torch.tensor(2.0), TIES]


@pytest.mark.parametrize("x", OPERANDS, ids=lambda x: f"{str(x.dtype)[6:]}{list(x.shape)}")
def test_scans(x):
    dim = -1 if x.shape[-1:] == (5,) else 0
    tolerance = {"rtol": 0.02, "atol": 0.02} if x.dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    check(A.cumsum.default, x, dim, **tolerance)
    check(A.cumprod.default, x, dim, **tolerance)
    check(A.cummax.default, x, dim)
    check(A.cummin.default, x, dim)
    if x.dtype.is_floating_point:
        check(A._logcumsumexp.default, x, dim, **tolerance)


def test_dtype():
    check(A.cumsum.default, torch.tensor([200, 100], dtype=torch.uint8), 0, dtype=torch.uint8)
    check(A.cumsum.default, torch.arange(4), 0, dtype=torch.float32)


def test_complex():
    x = torch.randn(2, 5, dtype=torch.complex64)
    check(A.cumsum.default, x, 1)
    check(A.logcumsumexp.default, x, 1, rtol=1e-4, atol=1e-4)
