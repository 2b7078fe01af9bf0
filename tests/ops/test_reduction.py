"""Reductions over dimensions."""

from __future__ import annotations

import math

import pytest
import torch
from harness import values

A = torch.ops.aten
X = torch.randn(3, 4, 5)
I = torch.randint(-5, 6, (3, 4, 5))  # noqa: E741
B = I > 0
COMPLEX = torch.randn(2, 3, dtype=torch.complex64)
EMPTY = torch.zeros(0, 3)
NAN = torch.tensor([[1.0, math.nan, 3.0], [2.0, 2.0, -math.inf]])
SCALAR = torch.tensor(2.5)
OPERANDS = [X, X.bfloat16(), X.double(), I, I.to(torch.uint8), B, EMPTY, SCALAR]
FLOATS = [X, X.bfloat16(), EMPTY, SCALAR, COMPLEX]
EXTREMES = [X, X.bfloat16(), I, B, NAN, SCALAR, torch.zeros(2, 0, 3)]

pytestmark = pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")


@values
def test_sums_and_products():
    for x in OPERANDS:
        yield A.sum.default, x
        for dim in ([0], [-1], [], None, [0, -1]):
            if dim != [0, -1] or x.dim() > 1:
                yield A.sum.dim_IntList, x, dim, len(dim or []) == 1
        yield A.prod.default, x
        yield A.prod.dim_int, x, -1, True
    for dtype in (torch.float64, torch.int32, torch.bfloat16):
        yield A.sum.default, I, {"dtype": dtype}
        yield A.sum.dim_IntList, I, [1], {"dtype": dtype}
        yield A.prod.dim_int, I, 1, {"dtype": dtype}
    yield A.sum.default, torch.full((100,), 200, dtype=torch.uint8)
    for dtype in (None, torch.float64):
        yield A.nansum.default, NAN.nan_to_num(neginf=1, nan=math.nan), [1], {"dtype": dtype}


@values
def test_truth():
    for x in (*OPERANDS, NAN):
        yield A.any.default, x
        yield A.any.dim, x, 0, True
        yield A.any.dims, x, None
        yield A.all.default, x
        yield A.all.dims, x, [-1]
        yield A.count_nonzero.default, x
        yield A.count_nonzero.dim_IntList, x, [0]


@values
def test_extremes():
    for x in EXTREMES:
        for name, keepdim in (("max", False), ("min", True)):
            yield getattr(A, name).dim, x, 0, keepdim
            yield getattr(A, f"a{name}").default, x, [-1], keepdim
            yield getattr(A, f"arg{name}").default, x.float(), -1, keepdim
        yield A.aminmax.default, x, {"dim": 0, "keepdim": True}
    for x in EXTREMES[:-1]:
        for name in ("max", "min"):
            yield getattr(A, name).default, x
            yield getattr(A, f"a{name}").default, x
            yield getattr(A, f"arg{name}").default, x.float()
        yield A.aminmax.default, x
        yield A._aminmax.default, x
    yield A.argmax.default, X, None, True
    for op in (A.argmax.default, A.argmin.default):  # the first of equal values
        yield op, torch.tensor([[1, 3, 3, 0], [0, 0, 0, 0]]), 1


@values
def test_moments():
    for x in FLOATS:
        yield A.mean.default, x
        for args in (([0], True), ([-1],), (None,)):
            yield A.mean.dim, x, *args
        for correction in (None, 2.5):
            yield A.var.correction, x, [0], {"correction": correction}
            yield A.std.correction, x, None, {"correction": correction, "keepdim": True}
            yield A.var_mean.correction, x, [-1], {"correction": correction, "keepdim": True}
            yield A.std_mean.correction, x, [], {"correction": correction}
    yield A.mean.dim, I, [0, 1], {"dtype": torch.float32}
    for x in (X, X.bfloat16(), SCALAR, I, torch.tensor([[-math.inf, -math.inf], [math.inf, 1.0]])):
        yield A.logsumexp.default, x, [-1]
        yield A.logsumexp.default, x, [0], True


@values
def test_norms():
    for order in (2, 1, 0, 3, -1, 0.5, math.inf, -math.inf):
        yield A.linalg_vector_norm.default, X, order
        yield A.linalg_vector_norm.default, X, order, [0, -1], True
    for x in (X.bfloat16(), COMPLEX, SCALAR):
        yield A.linalg_vector_norm.default, x, 2, [0]
        yield A.linalg_vector_norm.default, x, 3
    yield A.norm.Scalar, X
    yield A.norm.ScalarOpt_dim, X, 2, [0, 1], True
    yield A.norm.ScalarOpt_dim, X, None, [1]
    yield A.linalg_vector_norm.default, X.bfloat16(), 2, [1], {"dtype": torch.float32}
    yield A.dist.default, X, X[:1] * 2, 3
