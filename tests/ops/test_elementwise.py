"""Elementwise operators of two and three tensors."""

from __future__ import annotations

import math

import torch
from harness import lower, values

A = torch.ops.aten
INF, NAN = math.inf, math.nan
X = torch.tensor([[1.5, -2.5, 0.0, 7.25], [-0.0, 3.0, -9.5, 1e-3]])
Y = torch.tensor([2.0, -3.0, 0.5, -0.25])
I = torch.tensor([[7, -7, 0, 13], [-1, 5, -128, 3]])  # noqa: E741
J = torch.tensor([3, 3, -4, -5])
BOOLS = (torch.tensor([[True], [False]]), torch.tensor([True, False, True, False]))
EDGES = torch.tensor([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN])
PAIRS = (EDGES[:, None], EDGES[None, :])
SOME = {
    "float": (X, Y),
    "int": (I, J),
    "narrow": (I.to(torch.int8), J),
    "half and 0d float": (X.half(), torch.tensor(2.5)),
}
HALF = (X.bfloat16(), Y.bfloat16())
OPERANDS = [
    *SOME.values(),
    HALF,
    (X.bfloat16(), Y),
    (X, J),
    (I, torch.tensor(2.5)),
    (torch.zeros(0, 4), Y),
    (torch.tensor(2.0), torch.tensor(3)),
]
ARITHMETIC = ("add", "sub", "mul", "div", "remainder", "fmod", "eq", "lt", "ge")


@values
def test_arithmetic():
    for name in ARITHMETIC:
        op = getattr(A, name)
        for x, y in OPERANDS if name in ("add", "div", "lt") else SOME.values():
            yield op.Tensor, x, y
        for x in (X.bfloat16(), I.to(torch.int8)):
            for number in (-3, 1, 0.5):
                yield op.Scalar, x, number
    for name in ("remainder", "fmod", "div", "eq", "lt"):
        yield getattr(A, name).Tensor, *PAIRS
    for name in ("add", "mul", "div", "eq", "ne", "lt", "gt", "le", "ge"):
        yield getattr(A, name).Tensor, *BOOLS
        yield getattr(A, name).Scalar, X, True
    z = torch.tensor([1 + 2j, -0.5j])
    for name in ("add", "mul", "div"):
        yield getattr(A, name).Tensor, z, z[:, None]
        yield getattr(A, name).Scalar, X, 1 + 2j
    for x, y in ((X, Y), (I, J), (X.bfloat16(), J)):
        for alpha in (1, 2, -3):
            for op in (A.add.Tensor, A.sub.Tensor, A.rsub.Tensor):
                yield op, x, y, {"alpha": alpha}
        yield A.add.Scalar, x, 2, 3
        yield A.rsub.Scalar, x, 2, 3
    yield A._add_relu.Tensor, X, Y, {"alpha": -3}
    top = torch.tensor([127, -128], dtype=torch.int8)  # integers wrap
    yield A.add.Tensor, top, top
    yield A.mul.Tensor, top, top
    yield A.neg.default, top
    yield A.add.Scalar, torch.tensor([250], dtype=torch.uint8), 10
    for mode in (None, "floor", "trunc"):
        for x, y in (SOME["float"], HALF, SOME["int"]):
            yield A.div.Tensor_mode, x, y, {"rounding_mode": mode}
    for mode in ("floor", "trunc"):
        yield A.div.Tensor_mode, *PAIRS, {"rounding_mode": mode}
        yield A.div.Scalar_mode, torch.tensor([1.0, 0.9, -1.0]), 0.1, {"rounding_mode": mode}
    yield A.remainder.Scalar_Tensor, 7, J


def test_numbers_are_rounded_to_half_types_as_cpu_kernels_read_them():
    # Bit for bit: quotients, remainders and comparisons jump.
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.cat([torch.linspace(-40, 40, 301), torch.tensor([0.3, 1.3, 7.7, 1e-6])]).to(dtype)
        whole = torch.tensor(2051)
        for number in (0.3, 1.3, 7.7, 3e-6):
            for op in (A.add, A.sub, A.rsub, A.mul, A.fmod, A.remainder, A.floor_divide, A.eq, A.ne, A.lt, A.ge):
                one, several = (
                    getattr(op, "Scalar", None),
                    getattr(op, "Tensor", op.default if op is A.floor_divide else None),
                )
                calls = [(one, x, number), (several, x, torch.tensor(number)), (several, x, whole.expand(len(x)))]
                for overload, *args in calls:
                    got, want = lower(overload, *args)[0], overload(*args)
                    assert torch.equal(got.nan_to_num(), want.nan_to_num()), (overload, dtype, number)


@values
def test_powers():
    for exponent in (2, 3, 0, 1, -1, -2, 0.5, -0.5, 2.5, 10, True):
        yield A.pow.Tensor_Scalar, X.abs() + 0.5, exponent
        yield A.pow.Tensor_Scalar, X.abs().bfloat16() + 0.5, exponent
        if exponent >= 0:
            yield A.pow.Tensor_Scalar, I, exponent
    yield A.pow.Tensor_Tensor, X.abs(), Y
    yield A.pow.Tensor_Tensor, I, torch.tensor([0, 1, 5, 70])
    yield A.pow.Tensor_Tensor, torch.tensor([1, -1, 2, -1]), torch.tensor([-3, -3, -3, -4])
    yield A.pow.Tensor_Tensor, *PAIRS
    yield A.pow.Scalar, 2, torch.arange(5)
    yield A.pow.Scalar, 2.5, X
    for dtype in (torch.bfloat16, torch.float16):
        yield A.pow.Tensor_Scalar, X.abs().to(dtype) * 4, 3.3
        yield A.pow.Scalar, 1.3, X.to(dtype) * 3


def test_powers_of_two_are_exact_and_only_results_overflow():
    n = torch.arange(-126, 128)
    assert torch.equal(lower(A.exp2.default, n.float())[0], torch.ldexp(torch.ones(254), n))
    many = torch.tensor([[130], [20], [-20], [-140]])
    small = torch.tensor([0.0, 1e-3, -3.0, INF]).expand(4, 4)  # PyTorch warns of what it broadcasts
    for x in (small, small.half(), small.bfloat16(), small.double()):
        torch.testing.assert_close(lower(A.ldexp.Tensor, x, many)[0], torch.ldexp(x, many), rtol=0, atol=1e-40)
    for x, y in (
        (small[0].half(), torch.tensor([10.0, -3.0, 0.5, 2.0])),
        (torch.tensor([3, 4]), torch.tensor([1, -1])),
    ):
        torch.testing.assert_close(lower(A.ldexp.Tensor, x, y)[0], torch.ldexp(x, y))


@values
def test_functions():
    for name in ("maximum", "minimum", "fmax", "fmin", "floor_divide"):
        for x, y in (SOME["float"], HALF, SOME["int"]):
            yield getattr(A, name).default, x, y
    for name in ("maximum", "minimum", "fmax", "fmin", "heaviside", "atan2", "hypot", "logaddexp"):
        yield getattr(A, name).default, *PAIRS
    for op in (A.copysign.Tensor, A.xlogy.Tensor):
        for x, y in ((X, Y), (I, J.abs()), (X.bfloat16(), Y), PAIRS):
            yield op, x, y
    yield A.copysign.Scalar, X, -2.0
    yield A.xlogy.Scalar_Other, X.abs(), 2.0
    yield A.xlogy.Scalar_Self, 2.0, X.abs()
    yield A.special_xlog1py.default, X.abs(), Y.abs()
    yield A.special_xlog1py.self_scalar, 2, X.abs()
    yield A.ldexp.Tensor, X, J
    yield A.logaddexp2.default, X, Y
    yield A.nextafter.default, X, Y
    yield A.nextafter.default, *HALF
    for name in ("gcd", "lcm"):
        yield getattr(A, name).default, I[0], J
        yield getattr(A, name).default, I[0].int(), torch.tensor(6, dtype=torch.int32)


@values
def test_bits():
    for op in (A.bitwise_and, A.bitwise_or, A.bitwise_xor):
        yield op.Tensor, I, J
        yield op.Tensor, *BOOLS
        yield op.Scalar, I, 6
        yield op.Scalar_Tensor, 6, I
    for op in (A.bitwise_left_shift, A.bitwise_right_shift):
        yield op.Tensor, I, torch.tensor([0, 1, 3, 63])
        yield op.Tensor_Scalar, I.to(torch.uint8), 2
        yield op.Scalar_Tensor, -7, torch.tensor([1, 2])
    for op in (A.logical_and.default, A.logical_or.default, A.logical_xor.default):
        for x, y in (BOOLS, (I, Y), PAIRS):
            yield op, x, y


@values
def test_choices():
    for x in (X, X.bfloat16(), I, EDGES):
        for low, high in ((-1, 2), (0.5, None), (None, 1), (2, -1)):
            yield A.clamp.default, x, low, high
        yield A.clamp.Tensor, x, torch.tensor(-1), torch.tensor(2.0)
        yield A.clamp_min.default, x, 0
        yield A.clamp_max.default, x, 0.5
    yield A.clamp.Tensor, X[:1], torch.tensor([[-1.0], [NAN]]), None
    yield A.clamp_min.Tensor, X, Y
    for x, y in ((X, Y), (X, J), (I, torch.tensor(2.5)), (I, J), (X.bfloat16(), Y), OPERANDS[-1][::-1]):
        yield A.where.self, torch.tensor([[True], [False]]), x, y
    mask = X > 0
    yield A.masked_fill.Scalar, X, mask, -INF
    yield A.masked_fill.Scalar, X.bfloat16(), mask, 0.1
    yield A.masked_fill.Scalar, I, mask[:1], 3
    yield A.masked_fill.Tensor, I[0], mask, torch.tensor(4)


@values
def test_of_three_tensors():
    for weight in (0, 1, 0.3, 0.9):
        yield A.lerp.Scalar, X, Y, weight
        yield A.lerp.Scalar, *HALF, weight
        yield A.lerp.Tensor, X, Y, torch.full((4,), float(weight))
    z = torch.rand(2, 1) + 1
    for value in (1, 2, 0.5, -1):
        yield A.addcmul.default, X, Y, z, {"value": value}
        yield A.addcdiv.default, X, Y, z, {"value": value}
        yield A.addcmul.default, *HALF, z.bfloat16(), {"value": value}
        if value != 0.5:
            yield A.addcmul.default, I, J, J, {"value": value}


def test_lerp_ends_are_exact():
    start, end = torch.randn(100), torch.randn(100) * 1e6
    assert torch.equal(lower(A.lerp.Scalar, start, end, 1.0)[0], end)
