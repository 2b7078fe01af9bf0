"""Products of matrices and vectors."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from harness import values

from torch_xla._core.device import client
from torch_xla._core.execute import export
from torch_xla.ops import matmul

A = torch.ops.aten


def normal(*shape, dtype=torch.float32):
    return (
        torch.randn(*shape, dtype=dtype)
        if dtype.is_floating_point or dtype.is_complex
        else torch.randint(-5, 5, shape, dtype=dtype)
    )


PRODUCTS = [
    (A.mm.default, (3, 0), (0, 5)),
    (A.mv.default, (3, 4), (4,)),
    (A.bmm.default, (2, 3, 4), (2, 4, 5)),
    (A.dot.default, (7,), (7,)),
    (A.vdot.default, (7,), (7,)),
    (A.outer.default, (3,), (2,)),
    (A.linear.default, (4,), (5, 4)),
    (A.matmul.default, (2, 1, 3, 4), (5, 4, 2)),
    (A.matmul.default, (4,), (2, 4, 5)),
]
OF_INTEGERS = [((3, 4), (4, 5)), ((4,), (4,)), ((4,), (2, 4, 5)), ((2, 1, 3, 4), (2, 4, 5)), ((2, 3, 4), (4,))]
ACCUMULATED = [
    (A.addmm.default, torch.float32, (3, 5), (3, 4), (4, 5)),
    (A.addmm.default, torch.bfloat16, (5,), (3, 4), (4, 5)),
    (A.addmv.default, torch.float32, (3,), (3, 4), (4,)),
    (A.baddbmm.default, torch.float32, (2, 3, 5), (2, 3, 4), (2, 4, 5)),
    (A.addbmm.default, torch.float32, (3, 5), (2, 3, 4), (2, 4, 5)),
]


@values
def test_products():
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.complex64):
        yield A.mm.default, normal(3, 4, dtype=dtype), normal(4, 5, dtype=dtype)
        yield A.linear.default, *(normal(*shape, dtype=dtype) for shape in ((2, 3, 4), (5, 4), (5,)))
    for op, *shapes in PRODUCTS:
        for dtype in (torch.float32, torch.complex64):
            yield op, *(normal(*shape, dtype=dtype) for shape in shapes)
    for shapes in OF_INTEGERS:
        yield A.matmul.default, *(normal(*shape, dtype=torch.int64) for shape in shapes)
    yield A.linear.default, normal(2, 4, dtype=torch.int64), normal(3, 4, dtype=torch.int64)
    yield A.linear.default, normal(2, 4, dtype=torch.bfloat16), normal(3, 4, dtype=torch.bfloat16), None
    yield A._trilinear.default, normal(2, 3), normal(5, 3, 4), normal(2, 4), [1, 3], [0], [1, 2], [2, 3]
    x, y, w = (normal(*shape, dtype=torch.int64) for shape in ((3, 4), (3, 5), (2, 4, 5)))
    yield A._trilinear.default, x, w, y, [1, 3], [0], [1, 2], [2, 3]


@values
def test_accumulated_products():
    for op, dtype, *shapes in ACCUMULATED:
        for numbers in ({}, {"beta": 0}, {"beta": 0.5, "alpha": 2.0}, {"beta": 0.0}, {"alpha": 0.25}):
            yield op, *(normal(*shape, dtype=dtype) for shape in shapes), numbers
    for beta in (0, 0.0):  # which ignores NaN
        yield A.addmm.default, torch.full((3, 5), math.nan), normal(3, 4), normal(4, 5), {"beta": beta}
    integers = (normal(*shape, dtype=torch.int64) for shape in ((3, 5), (3, 4), (4, 5)))
    yield A.addmm.default, *integers, {"beta": 3, "alpha": 2}
    for use_gelu in (False, True):
        yield A._addmm_activation.default, normal(5), normal(3, 4), normal(4, 5), {"use_gelu": use_gelu}


@pytest.mark.parametrize(
    ("a", "b", "contracting", "batch"),
    [
        ((3, 4), (4, 5), ((1,), (0,)), ((), ())),
        ((2, 3, 4), (2, 4, 5), ((2,), (1,)), ((0,), (0,))),
        ((4,), (4,), ((0,), (0,)), ((), ())),
        ((5, 2, 3, 4), (2, 4, 6, 5), ((3,), (1,)), ((1, 0), (0, 3))),
        ((2, 3, 4), (3, 2, 4), ((0, 2), (1, 2)), ((), ())),
        ((3, 0), (0, 2), ((1,), (0,)), ((), ())),
    ],
)
def test_products_of_integers_on_tpus_are_those_of_cpus(a, b, contracting, batch):
    draw = np.random.default_rng(0)
    x, y = draw.integers(-(2**62), 2**62, a), draw.integers(-9, 9, b)
    with client.x64():
        expected = jax.lax.dot_general(x, y, (contracting, batch))
        got = matmul._sum_of_products(jnp.asarray(x), jnp.asarray(y), contracting, batch)
    assert got.dtype == expected.dtype == jnp.int64
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("platform", "products"), [("cuda", 1), ("tpu", 0)])
def test_tpus_get_no_products_of_64_bit_integers(platform, products):
    a, b = (torch.ones(3, 3, dtype=torch.int64, device="xla") for _ in range(2))
    text = export.lowered([a @ b], "graph", platform).stage.as_text()
    assert text.count("stablehlo.dot_general") == products
    bilinear = torch.nn.functional.bilinear(a, b, torch.stack([a, b]))
    text = export.lowered([bilinear], "graph", platform).stage.as_text()
    assert "stablehlo.dot_general" not in text
