"""Reductions over dimensions."""

from __future__ import annotations

import math

import pytest
import torch
from harness import check

A = torch.ops.aten
X = torch.randn(3, 4, 5)
I = torch.randint(-5, 6, (3, 4, 5))  # noqa: E741
B = I > 0
EMPTY = torch.zeros(0, 3)
NAN = torch.tensor([[1.0, math.nan, 3.0], [2.0, 2.0, -math.inf]])
SCALAR = torch.tensor(2.5)
OPERANDS = [X, X.bfloat16(), X.double(), I, I.to(torch.uint8), B, EMPTY, SCALAR]
FLOATS = [X, X.bfloat16(), EMPTY, SCALAR, torch.randn(2, 3, dtype=torch.complex64)]
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def describe(x):
    return f"{str(x.dtype)[6:]}{list(x.shape)}"


def tolerance(x):
    return {"rtol": 0.02, "atol": 0.02} if x.dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize("x", OPERANDS, ids=describe)
def test_sum(x):
    check(A.sum.default, x, **tolerance(x))
    for dim in ([0], [-1], [], None, [0, -1]):
        if dim != [0, -1] or x.dim() > 1:
            check(A.sum.dim_IntList, x, dim, len(dim or []) == 1, **tolerance(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.bfloat16])
def test_sum_dtype(dtype):
    check(A.sum.default, I, dtype=dtype)
    check(A.sum.dim_IntList, I, [1], dtype=dtype)
    check(A.prod.dim_int, I, 1, dtype=dtype)


def test_sum_of_bytes_does_not_wrap():
    check(A.sum.default, torch.full((100,), 200, dtype=torch.uint8))


@pytest.mark.parametrize("x", FLOATS, ids=describe)
def test_mean(x):
    check(A.mean.default, x, **tolerance(x))
    check(A.mean.dim, x, [0], True, **tolerance(x))
    check(A.mean.dim, x, [-1], **tolerance(x))
    check(A.mean.dim, x, None, **tolerance(x))


def test_mean_dtype():
    check(A.mean.dim, I, [0, 1], dtype=torch.float32)


@pytest.mark.parametrize("x", OPERANDS, ids=describe)
def test_prod(x):
    check(A.prod.default, x, **tolerance(x))
    check(A.prod.dim_int, x, -1, True, **tolerance(x))


@pytest.mark.parametrize("x", [*OPERANDS, NAN], ids=describe)
def test_truth(x):
    check(A.any.default, x)
    check(A.any.dim, x, 0, True)
    check(A.any.dims, x, None)
    check(A.all.default, x)
    check(A.all.dims, x, [-1])
    check(A.count_nonzero.default, x)
    check(A.count_nonzero.dim_IntList, x, [0])


EXTREMES = [X, X.bfloat16(), I, B, NAN, SCALAR, torch.zeros(2, 0, 3)]


@pytest.mark.parametrize("x", EXTREMES, ids=describe)
def test_extremes_along_a_dimension(x):
    for name, keepdim in (("max", False), ("min", True)):
        check(getattr(A, name).dim, x, 0, keepdim)
        check(getattr(A, "a" + name).default, x, [-1], keepdim)
        check(getattr(A, "arg" + name).default, x.float(), -1, keepdim)
    check(A.aminmax.default, x, dim=0, keepdim=True)


@pytest.mark.parametrize("x", EXTREMES[:-1], ids=describe)
def test_extremes_of_all(x):
    for name in ("max", "min"):
        check(getattr(A, name).default, x)
        check(getattr(A, "a" + name).default, x)
        check(getattr(A, "arg" + name).default, x.float())
    check(A.aminmax.default, x)
    check(A._aminmax.default, x)


def test_argmax_of_all_keeps_dimensions():
    check(A.argmax.default, X, None, True)


def test_first_of_equal_values():
    x = torch.tensor([[1, 3, 3, 0], [0, 0, 0, 0]])
    for name in ("argmax", "argmin"):
        check(getattr(A, name).default, x, 1)


@pytest.mark.parametrize("x", FLOATS, ids=describe)
@pytest.mark.parametrize("correction", [None, 2.5])
@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0")
def test_moments(x, correction):
    check(A.var.correction, x, [0], correction=correction, **tolerance(x))
    check(A.std.correction, x, None, correction=correction, keepdim=True, **tolerance(x))
    check(A.var_mean.correction, x, [-1], correction=correction, keepdim=True, **tolerance(x))
    check(A.std_mean.correction, x, [], correction=correction, **tolerance(x))


@pytest.mark.parametrize("x", [X, X.bfloat16(), SCALAR, I, torch.tensor([[-math.inf, -math.inf], [math.inf, 1.0]])])
def test_logsumexp(x):
    check(A.logsumexp.default, x, [-1], **tolerance(x))
    check(A.logsumexp.default, x, [0], True, **tolerance(x))


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_nansum(dtype):
    check(A.nansum.default, NAN.nan_to_num(neginf=1, nan=math.nan), [1], dtype=dtype)


@pytest.mark.parametrize("order", [2, 1, 0, 3, -1, 0.5, math.inf, -math.inf], ids=repr)
def test_norm(order):
    check(A.linalg_vector_norm.default, X, order, **TOLERANCE)
    check(A.linalg_vector_norm.default, X, order, [0, -1], True, **TOLERANCE)


@pytest.mark.parametrize("x", [X.bfloat16(), torch.randn(2, 3, dtype=torch.complex64), SCALAR], ids=describe)
def test_norm_types(x):
    check(A.linalg_vector_norm.default, x, 2, [0], **tolerance(x))
    check(A.linalg_vector_norm.default, x, 3, **tolerance(x))


def test_norm_forms():
    check(A.norm.Scalar, X)
    check(A.norm.ScalarOpt_dim, X, 2, [0, 1], True)
    check(A.norm.ScalarOpt_dim, X, None, [1])
    check(A.linalg_vector_norm.default, X.bfloat16(), 2, [1], dtype=torch.float32)
    check(A.dist.default, X, X[:1] * 2, 3)
