"""Elementwise operators of one tensor."""

from __future__ import annotations

import math

import pytest
import torch
from harness import check

from torch_xla.ops import unary

A = torch.ops.aten
INF, NAN = math.inf, math.nan
EDGES = torch.tensor([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, 2.5, -2.5, 3.7, -80.0, INF, -INF, NAN])
INTEGERS = torch.tensor([[-3, -1, 0], [1, 2, 100]])
BOOLS = torch.tensor([True, False])

# Beyond these the kernels differ in the last digits only.
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def overload(name):
    return getattr(A, name).default


@pytest.mark.parametrize("name", sorted(unary._FLOATING))
def test_floating(name):
    check(overload(name), EDGES, **TOLERANCE)


@pytest.mark.parametrize("name", ["exp", "reciprocal", "sqrt", "sigmoid", "tanh", "acosh"])
@pytest.mark.parametrize(
    "x",
    [
        torch.tensor(0.7),
        torch.zeros(0, 3),
        torch.rand(4, 5).add(1).bfloat16(),
        torch.rand(3).half(),
        torch.rand(3).double(),
        BOOLS,
        INTEGERS,
        torch.rand(2, 2).add(1).to(torch.complex64),
    ],
    ids=["0d", "empty", "bfloat16", "float16", "float64", "bool", "int64", "complex64"],
)
def test_floating_types(name, x):
    check(overload(name), x)


PLAIN = ("abs", "neg", "sign", "sgn", "signbit", "ceil", "floor", "trunc", "round", "relu", "logical_not", "isnan")


@pytest.mark.parametrize("name", (*PLAIN, "frac", "isinf", "isposinf", "isneginf"))
def test_plain(name):
    check(overload(name), EDGES[:-3] if name == "frac" else EDGES)
    check(overload(name), EDGES[:8].bfloat16())


@pytest.mark.parametrize("name", [*PLAIN, "isinf", "isposinf", "isneginf", "bitwise_not"])
def test_plain_integers(name):
    check(overload(name), INTEGERS)
    check(overload(name), torch.tensor(200, dtype=torch.uint8))


@pytest.mark.parametrize("name", ["bitwise_not", "logical_not", "sign", "isnan", "signbit"])
def test_plain_bools(name):
    check(overload(name), BOOLS)


@pytest.mark.parametrize("decimals", [2, 0, -1])
def test_round_decimals(decimals):
    check(A.round.decimals, torch.tensor([1.2345, -27.555, 15.0, 25.0]), decimals=decimals)


@pytest.mark.parametrize("x", [EDGES, EDGES.bfloat16(), INTEGERS, torch.complex(EDGES, -EDGES)])
@pytest.mark.parametrize("numbers", [(None, None, None), (1.0, 2.0, None)])
def test_nan_to_num(x, numbers):
    check(A.nan_to_num.default, x, *numbers)


def test_frexp():
    check(A.frexp.Tensor, torch.tensor([0.0, 1.0, -3.5, 1e30, 0.1]))


@pytest.mark.parametrize("x", [EDGES, INTEGERS, torch.randn(3, dtype=torch.complex64)])
def test_angle(x):
    check(A.angle.default, x)


@pytest.mark.parametrize("name", ["abs", "sgn", "sin", "log", "neg", "isinf", "isnan", "tan", "sigmoid", "log2"])
def test_complex(name):
    x = torch.tensor([1 + 2j, -0.5 + 0.1j, 0.3 - 0.7j, 0.2j])
    check(overload(name), x, **TOLERANCE)


def test_complex_from_parts():
    check(A.complex.default, torch.randn(2, 1), torch.randn(3))
    check(A.polar.default, torch.rand(3), torch.randn(3), **TOLERANCE)


@pytest.mark.parametrize("x", [torch.tensor([-1.9, 0.0, 2.5, 300.7]), INTEGERS, BOOLS, torch.tensor([1 + 2j, 0j])])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.int8, torch.bool])
@pytest.mark.filterwarnings("ignore:Casting complex")
def test_to_copy(x, dtype):
    check(A._to_copy.default, x, dtype=dtype)


def test_to_bool_of_nan():
    check(A._to_copy.default, EDGES, dtype=torch.bool)


def test_copies():
    x = torch.randn(2, 3)
    check(A.clone.default, x)
    check(A.clone.default, x.t(), memory_format=torch.contiguous_format)
    check(A.copy.default, x, torch.arange(3))
    check(A.copy.default, torch.arange(3), torch.tensor(2.7))


@pytest.mark.parametrize("x", [torch.randn(2, 3), torch.arange(3), torch.zeros(0), torch.tensor(1.5), BOOLS])
def test_fill(x):
    check(A.fill.Scalar, x, 2.7)
    check(A.fill.Scalar, x, True)
    check(A.fill.Tensor, x, torch.tensor(3))
    check(A.zero.default, x)
