"""Pooling and its gradients."""

from __future__ import annotations

import math

import pytest
import torch
from harness import check

A = torch.ops.aten
TOL = {"rtol": 1e-4, "atol": 1e-5}
SIZES = [10, 11, 12]
# kernel, stride, padding, dilation, ceil_mode
MAX_CASES = [
    (2, 2, 0, 1, False),
    (3, 2, 1, 1, False),
    (3, 2, 1, 1, True),
    (2, 3, 1, 2, True),
    (3, 1, 1, 2, False),
]


@pytest.mark.parametrize(("n", "case"), [(1, MAX_CASES[1]), *((2, c) for c in MAX_CASES), (3, MAX_CASES[3])], ids=str)
def test_max_pool(n, case):
    k, s, p, d, ceil = case
    x = torch.randn(2, 3, *SIZES[:n]).round(decimals=1)
    args = ([k] * n, [s] * n, [p] * n, [d] * n, ceil)
    op = getattr(A, f"max_pool{n}d_with_indices").default
    check(op, x, *args)
    if n > 1:
        out, indices = op(x, *args)
        backward = getattr(A, f"max_pool{n}d_with_indices_backward").default
        check(backward, torch.randn_like(out), x, *args, indices, **TOL)


def test_max_pool_of_special_values():
    x = torch.randn(1, 6, 6)
    x[0, 2, 3], x[0, 0, 0] = math.nan, -math.inf
    check(A.max_pool2d_with_indices.default, x, [3, 3], [2, 2], [1, 1])
    check(A.max_pool2d_with_indices.default, torch.full((1, 4, 4), -math.inf), [2, 2], [2, 2], [1, 1])
    check(A.max_pool2d_with_indices.default, torch.randint(0, 9, (2, 4, 4)), [2, 2])
    check(A.max_pool2d_with_indices.default, torch.randn(2, 4, 4, dtype=torch.bfloat16), [2, 2])
    check(A.max_pool2d_with_indices.default, torch.randn(0, 3, 4, 4), [2, 2])


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("everywhere", [True, False])
def test_maxima_of_what_compares_with_nothing(value, everywhere):
    """Of several NaN the last is chosen, of equals the first; padding never."""
    generator = torch.Generator().manual_seed(0)
    for n in (2, 3):
        x = torch.randn(2, *(5,) * n, generator=generator)
        x[torch.full_like(x, everywhere, dtype=torch.bool) | (x > 0)] = value
        for k, s, p, d, ceil in MAX_CASES:
            check(getattr(A, f"max_pool{n}d_with_indices").default, x, [k] * n, [s] * n, [p] * n, [d] * n, ceil)
        check(getattr(A, f"adaptive_max_pool{n}d").default, x, [3] * n)
        check(getattr(A, f"fractional_max_pool{n}d").default, x[None], [2] * n, [3] * n, torch.full((1, 2, n), 0.4))
    large = torch.randn(2, 16, 14, generator=generator)
    large[torch.full_like(large, everywhere, dtype=torch.bool) | (large > 0)] = value
    check(A.max_pool2d_with_indices.default, large, [10, 10], [3, 3], [2, 2], [1, 1], True)


def test_max_pool_of_large_windows():
    x = torch.randn(2, 16, 14)
    x[0, 5, 5] = math.nan
    args = ([10, 10], [3, 3], [2, 2], [1, 1], True)
    check(A.max_pool2d_with_indices.default, x, *args)
    out, indices = A.max_pool2d_with_indices.default(x, *args)
    check(A.max_pool2d_with_indices_backward.default, torch.randn_like(out), x, *args, indices, **TOL)


AVG_CASES = [
    (2, 2, 0, False, True, None),
    (3, 2, 1, True, True, None),
    (3, 2, 1, True, False, None),
    (3, 1, 1, False, False, 5),
]


@pytest.mark.parametrize(("n", "case"), [*((2, c) for c in AVG_CASES), (3, AVG_CASES[2])], ids=str)
def test_avg_pool(n, case):
    k, s, p, ceil, include, divisor = case
    x = torch.randn(2, 3, *SIZES[:n])
    args = ([k] * n, [s] * n, [p] * n, ceil, include, divisor)
    op = getattr(A, f"avg_pool{n}d").default
    check(op, x, *args, **TOL)
    check(getattr(A, f"avg_pool{n}d_backward").default, torch.randn_like(op(x, *args)), x, *args, **TOL)


def test_avg_pool_corners():
    check(A.avg_pool1d.default, torch.randn(2, 3, 9), [3], [2], [1], **TOL)
    check(A.avg_pool2d.default, torch.randn(2, 3, 9, 9, dtype=torch.bfloat16), [3, 3], rtol=1e-2, atol=1e-2)
    check(A.avg_pool2d.default, torch.randn(3, 14, 14), [10, 10], [2, 2], [3, 3], True, False, **TOL)
    check(A.avg_pool2d.default, torch.randint(0, 99, (1, 8, 8)), [3, 3], [2, 2])
    whole, given = torch.randint(-99, 99, (2, 3, 3)), torch.ones(2, 8, 8, dtype=torch.int64)
    check(A.avg_pool2d_backward.default, whole, given, [3, 3], [2, 2], [0], False, True, None)
    check(A.avg_pool2d_backward.default, given * 7, given, [1], [1], [0], False, False, None)
    check(A.avg_pool2d_backward.default, given[:, :1, :1] * 99, given, [8, 8], [8, 8], [0], False, False, None)


@pytest.mark.parametrize(("n", "out"), [(2, 1), (2, 2), (2, 7), (3, 5)])
def test_adaptive_pool(n, out):
    x = torch.randn(2, 3, *SIZES[:n])
    average, maximum = getattr(A, f"_adaptive_avg_pool{n}d").default, getattr(A, f"adaptive_max_pool{n}d").default
    check(average, x, [out] * n, **TOL)
    grad = torch.randn(2, 3, *[out] * n)
    check(getattr(A, f"_adaptive_avg_pool{n}d_backward").default, grad, x, **TOL)
    check(maximum, x, [out] * n)
    _, indices = maximum(x, [out] * n)
    check(getattr(A, f"adaptive_max_pool{n}d_backward").default, grad, x, indices, **TOL)


def test_adaptive_pool_in_one_dimension_and_ties():
    check(A.adaptive_avg_pool1d.default, torch.randn(2, 3, 10), [4], **TOL)
    check(A.adaptive_max_pool1d.default, torch.randn(2, 3, 10), [4])
    check(A.adaptive_max_pool2d.default, torch.ones(2, 6, 6), [4, 3])


def test_max_unpool():
    x = torch.randn(2, 3, 8, 8)
    out, indices = A.max_pool2d_with_indices.default(x, [2, 2])
    check(A.max_unpool2d.default, out, indices, [8, 8])
