"""Elementwise operators of one tensor."""

from __future__ import annotations

import math

import pytest
import torch
from harness import values

from torch_xla.ops import unary

A = torch.ops.aten
INF, NAN = math.inf, math.nan
EDGES = torch.tensor([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1.5, 2.5, -2.5, 3.7, -80.0, INF, -INF, NAN])
INTEGERS = torch.tensor([[-3, -1, 0], [1, 2, 100]])
BOOLS = torch.tensor([True, False])

PLAIN = ("abs", "neg", "sign", "sgn", "signbit", "ceil", "floor", "trunc", "round", "relu", "logical_not", "isnan")
INFINITE = ("isinf", "isposinf", "isneginf")
TYPES = [
    torch.tensor(0.7),
    torch.zeros(0, 3),
    torch.rand(4, 5).add(1).bfloat16(),
    torch.rand(3).half(),
    torch.rand(3).double(),
    BOOLS,
    INTEGERS,
    torch.rand(2, 2).add(1).to(torch.complex64),
]

pytestmark = pytest.mark.filterwarnings("ignore:Casting complex")


@values
def test_functions():
    for name in sorted(unary._FLOATING):
        yield getattr(A, name).default, EDGES
    for name in ("exp", "reciprocal", "sqrt", "sigmoid", "tanh", "acosh"):
        for x in TYPES:
            yield getattr(A, name).default, x
    for name in ("abs", "sgn", "sin", "log", "neg", "isinf", "isnan", "tan", "sigmoid", "log2"):
        yield getattr(A, name).default, torch.tensor([1 + 2j, -0.5 + 0.1j, 0.3 - 0.7j, 0.2j])
    for name in (*PLAIN, "frac", *INFINITE):
        yield getattr(A, name).default, EDGES[:-3] if name == "frac" else EDGES
        yield getattr(A, name).default, EDGES[:8].bfloat16()
    for name in (*PLAIN, *INFINITE, "bitwise_not"):
        yield getattr(A, name).default, INTEGERS
        yield getattr(A, name).default, torch.tensor(200, dtype=torch.uint8)
    for name in ("bitwise_not", "logical_not", "sign", "isnan", "signbit"):
        yield getattr(A, name).default, BOOLS
    for decimals in (2, 0, -1):
        yield A.round.decimals, torch.tensor([1.2345, -27.555, 15.0, 25.0]), {"decimals": decimals}
    for x in (EDGES, EDGES.bfloat16(), INTEGERS, torch.complex(EDGES, -EDGES)):
        for numbers in ((None, None, None), (1.0, 2.0, None)):
            yield A.nan_to_num.default, x, *numbers
    yield A.frexp.Tensor, torch.tensor([0.0, 1.0, -3.5, 1e30, 0.1])
    for x in (EDGES, INTEGERS, torch.randn(3, dtype=torch.complex64)):
        yield A.angle.default, x
    yield A.complex.default, torch.randn(2, 1), torch.randn(3)
    yield A.polar.default, torch.rand(3), torch.randn(3)


@values
def test_copies():
    for x in (torch.tensor([-1.9, 0.0, 2.5, 300.7]), INTEGERS, BOOLS, torch.tensor([1 + 2j, 0j])):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.int8, torch.bool):
            yield A._to_copy.default, x, {"dtype": dtype}
    yield A._to_copy.default, EDGES, {"dtype": torch.bool}
    x = torch.randn(2, 3)
    yield A.clone.default, x
    yield A.clone.default, x.t(), {"memory_format": torch.contiguous_format}
    yield A.copy.default, x, torch.arange(3)
    yield A.copy.default, torch.arange(3), torch.tensor(2.7)
    for x in (torch.randn(2, 3), torch.arange(3), torch.zeros(0), torch.tensor(1.5), BOOLS):
        yield A.fill.Scalar, x, 2.7
        yield A.fill.Scalar, x, True
        yield A.fill.Tensor, x, torch.tensor(3)
        yield A.zero.default, x
