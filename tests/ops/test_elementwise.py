"""Elementwise operators of two and three tensors."""

from __future__ import annotations

import math

import pytest
import torch
from harness import check, lower

A = torch.ops.aten
INF, NAN = math.inf, math.nan
X = torch.tensor([[1.5, -2.5, 0.0, 7.25], [-0.0, 3.0, -9.5, 1e-3]])
Y = torch.tensor([2.0, -3.0, 0.5, -0.25])
I = torch.tensor([[7, -7, 0, 13], [-1, 5, -128, 3]])  # noqa: E741
J = torch.tensor([3, 3, -4, -5])
B = torch.tensor([True, False, True, False])
EDGES = torch.tensor([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN])
PAIRS = (EDGES[:, None], EDGES[None, :])

OPERANDS = {
    "float": (X, Y),
    "half": (X.bfloat16(), Y.bfloat16()),
    "mixed": (X.bfloat16(), Y),
    "int": (I, J),
    "narrow": (I.to(torch.int8), J),
    "float and int": (X, J),
    "int and 0d float": (I, torch.tensor(2.5)),
    "half and 0d float": (X.half(), torch.tensor(2.5)),
    "empty": (torch.zeros(0, 4), Y),
    "0d": (torch.tensor(2.0), torch.tensor(3)),
}
BOOLS = (torch.tensor([[True], [False]]), B)
ARITHMETIC = ("add", "sub", "mul", "div", "remainder", "fmod", "eq", "lt", "ge")


def operands(*names):
    names = names or tuple(OPERANDS)
    return pytest.mark.parametrize("x, y", [OPERANDS[n] for n in names], ids=names)


@pytest.mark.parametrize("name", ["add", "div", "lt"])
@operands()
def test_promotion(name, x, y):
    check(getattr(A, name).Tensor, x, y)


@pytest.mark.parametrize("name", [name for name in ARITHMETIC if name not in ("add", "div", "lt")])
@operands("float", "int", "narrow", "half and 0d float")
def test_arithmetic(name, x, y):
    check(getattr(A, name).Tensor, x, y)


@pytest.mark.parametrize("name", ["maximum", "minimum", "fmax", "fmin", "floor_divide"])
@operands("float", "half", "int")
def test_choice(name, x, y):
    check(getattr(A, name).default, x, y)


@pytest.mark.parametrize("number", [-3, 1, 0.5], ids=repr)
@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("x", [X.bfloat16(), I.to(torch.int8)], ids=lambda x: str(x.dtype))
def test_numbers(name, x, number):
    check(getattr(A, name).Scalar, x, number)


@pytest.mark.parametrize("name", ["add", "mul", "div", "eq", "ne", "lt", "gt", "le", "ge"])
def test_bools(name):
    check(getattr(A, name).Tensor, *BOOLS)
    check(getattr(A, name).Scalar, X, True)


@pytest.mark.parametrize("name", ["add", "mul", "div"])
def test_complex_and_lifted_complex(name):
    z = torch.tensor([1 + 2j, -0.5j])
    check(getattr(A, name).Tensor, z, z[:, None])
    check(getattr(A, name).Scalar, X, 1 + 2j)


@pytest.mark.parametrize("x, y", [(X, Y), (I, J), (X.bfloat16(), J)])
def test_alpha(x, y):
    for alpha in (1, 2, -3):
        check(A.add.Tensor, x, y, alpha=alpha)
        check(A.sub.Tensor, x, y, alpha=alpha)
        check(A.rsub.Tensor, x, y, alpha=alpha)
    check(A.add.Scalar, x, 2, 3)
    check(A.rsub.Scalar, x, 2, 3)


def test_add_relu():
    check(A._add_relu.Tensor, X, Y, alpha=-3)


def test_integers_wrap():
    top = torch.tensor([127, -128], dtype=torch.int8)
    check(A.add.Tensor, top, top)
    check(A.mul.Tensor, top, top)
    check(A.neg.default, top)
    check(A.add.Scalar, torch.tensor([250], dtype=torch.uint8), 10)


@pytest.mark.parametrize("mode", [None, "floor", "trunc"])
@operands("float", "half", "int")
def test_div_modes(mode, x, y):
    check(A.div.Tensor_mode, x, y, rounding_mode=mode)


@pytest.mark.parametrize("mode", ["floor", "trunc"])
def test_div_modes_of_edges(mode):
    check(A.div.Tensor_mode, *PAIRS, rounding_mode=mode)
    check(A.div.Scalar_mode, torch.tensor([1.0, 0.9, -1.0]), 0.1, rounding_mode=mode)


@pytest.mark.parametrize("name", ["remainder", "fmod", "div", "eq", "lt"])
def test_arithmetic_of_edges(name):
    check(getattr(A, name).Tensor, *PAIRS)


@pytest.mark.parametrize("name", ["maximum", "minimum", "fmax", "fmin", "heaviside", "atan2", "hypot", "logaddexp"])
def test_functions_of_edges(name):
    check(getattr(A, name).default, *PAIRS)


def test_remainder_of_number():
    check(A.remainder.Scalar_Tensor, 7, J)


@pytest.mark.parametrize("exponent", [2, 3, 0, 1, -1, -2, 0.5, -0.5, 2.5, 10, True], ids=repr)
def test_pow_of_number(exponent):
    check(A.pow.Tensor_Scalar, X.abs() + 0.5, exponent)
    check(A.pow.Tensor_Scalar, X.abs().bfloat16() + 0.5, exponent)
    if exponent >= 0:
        check(A.pow.Tensor_Scalar, I, exponent)


def test_pow():
    check(A.pow.Tensor_Tensor, X.abs(), Y)
    check(A.pow.Tensor_Tensor, I, torch.tensor([0, 1, 5, 70]))
    check(A.pow.Tensor_Tensor, torch.tensor([1, -1, 2, -1]), torch.tensor([-3, -3, -3, -4]))
    check(A.pow.Tensor_Tensor, *PAIRS)
    check(A.pow.Scalar, 2, torch.arange(5))
    check(A.pow.Scalar, 2.5, X)


@pytest.mark.parametrize("name", ["copysign", "xlogy"])
def test_floating_functions(name):
    check(getattr(A, name).Tensor, X, Y)
    check(getattr(A, name).Tensor, I, J.abs())
    check(getattr(A, name).Tensor, X.bfloat16(), Y)
    check(getattr(A, name).Tensor, *PAIRS)


def test_scalar_forms():
    check(A.copysign.Scalar, X, -2.0)
    check(A.xlogy.Scalar_Other, X.abs(), 2.0)
    check(A.xlogy.Scalar_Self, 2.0, X.abs())
    check(A.special_xlog1py.default, X.abs(), Y.abs())
    check(A.special_xlog1py.self_scalar, 2, X.abs())
    check(A.ldexp.Tensor, X, J)
    check(A.logaddexp2.default, X, Y)


def test_nextafter():
    check(A.nextafter.default, X, Y)
    check(A.nextafter.default, X.bfloat16(), Y.bfloat16())


@pytest.mark.parametrize("name", ["bitwise_and", "bitwise_or", "bitwise_xor"])
def test_bitwise(name):
    check(getattr(A, name).Tensor, I, J)
    check(getattr(A, name).Tensor, *BOOLS)
    check(getattr(A, name).Scalar, I, 6)
    check(getattr(A, name).Scalar_Tensor, 6, I)


@pytest.mark.parametrize("name", ["bitwise_left_shift", "bitwise_right_shift"])
def test_shifts(name):
    check(getattr(A, name).Tensor, I, torch.tensor([0, 1, 3, 63]))
    check(getattr(A, name).Tensor_Scalar, I.to(torch.uint8), 2)
    check(getattr(A, name).Scalar_Tensor, -7, torch.tensor([1, 2]))


@pytest.mark.parametrize("name", ["logical_and", "logical_or", "logical_xor"])
def test_logic(name):
    check(getattr(A, name).default, *BOOLS)
    check(getattr(A, name).default, I, Y)
    check(getattr(A, name).default, *PAIRS)


@pytest.mark.parametrize("name", ["gcd", "lcm"])
def test_divisors(name):
    check(getattr(A, name).default, I[0], J)
    check(getattr(A, name).default, I[0].int(), torch.tensor(6, dtype=torch.int32))


@pytest.mark.parametrize("x", [X, X.bfloat16(), I, EDGES], ids=["float", "half", "int", "edges"])
def test_clamp(x):
    check(A.clamp.default, x, -1, 2)
    check(A.clamp.default, x, 0.5)
    check(A.clamp.default, x, None, 1)
    check(A.clamp.Tensor, x, torch.tensor(-1), torch.tensor(2.0))
    check(A.clamp.default, x, 2, -1)
    check(A.clamp_min.default, x, 0)
    check(A.clamp_max.default, x, 0.5)


def test_clamp_broadcasts():
    check(A.clamp.Tensor, X[:1], torch.tensor([[-1.0], [NAN]]), None)
    check(A.clamp_min.Tensor, X, Y)


@pytest.mark.parametrize(
    "x, y", [(X, Y), (X, J), (I, torch.tensor(2.5)), (I, J), (X.bfloat16(), Y), (torch.tensor(1), torch.tensor(2.0))]
)
def test_where(x, y):
    check(A.where.self, torch.tensor([[True], [False]]), x, y)


def test_masked_fill():
    mask = X > 0
    check(A.masked_fill.Scalar, X, mask, -INF)
    check(A.masked_fill.Scalar, X.bfloat16(), mask, 0.1)
    check(A.masked_fill.Scalar, I, mask[:1], 3)
    check(A.masked_fill.Tensor, I[0], mask, torch.tensor(4))


@pytest.mark.parametrize("weight", [0, 1, 0.3, 0.9], ids=repr)
def test_lerp(weight):
    check(A.lerp.Scalar, X, Y, weight)
    check(A.lerp.Scalar, X.bfloat16(), Y.bfloat16(), weight)
    check(A.lerp.Tensor, X, Y, torch.full((4,), float(weight)))


def test_lerp_ends_are_exact():
    start, end = torch.randn(100), torch.randn(100) * 1e6
    assert torch.equal(lower(A.lerp.Scalar, start, end, 1.0)[0], end)


@pytest.mark.parametrize("value", [1, 2, 0.5, -1], ids=repr)
def test_addc(value):
    z = torch.rand(2, 1) + 1
    check(A.addcmul.default, X, Y, z, value=value)
    check(A.addcdiv.default, X, Y, z, value=value)
    check(A.addcmul.default, X.bfloat16(), Y.bfloat16(), z.bfloat16(), value=value)
    if value != 0.5:
        check(A.addcmul.default, I, J, J, value=value)
