"""Running sums, products and extremes."""

from __future__ import annotations

import math

import torch
from harness import values

A = torch.ops.aten
X = torch.randn(3, 4)
TIES = torch.tensor([[1.0, 1.0, 0.0, 2.0, 2.0], [0.0, math.nan, 5.0, math.nan, 1.0], [-math.inf] * 5])
OPERANDS = [X, X.bfloat16(), torch.randint(-3, 4, (3, 4)), X > 0, torch.zeros(0, 4), torch.tensor(2.0), TIES]


@values
def test_scans():
    for x in OPERANDS:
        dim = -1 if x is TIES else 0
        for op in (A.cumsum.default, A.cumprod.default, A.cummax.default, A.cummin.default):
            yield op, x, dim
        if x.dtype.is_floating_point:
            yield A._logcumsumexp.default, x, dim
    yield A.cumsum.default, torch.tensor([200, 100], dtype=torch.uint8), 0, {"dtype": torch.uint8}
    yield A.cumsum.default, torch.arange(4), 0, {"dtype": torch.float32}
    x = torch.randn(2, 5, dtype=torch.complex64)
    yield A.cumsum.default, x, 1
    yield A.logcumsumexp.default, x, 1
