"""Pooling and its gradients."""

from __future__ import annotations

import math

import torch
from harness import values

A = torch.ops.aten
SIZES = [10, 11, 12]
# kernel, stride, padding, dilation, ceil_mode
MAX_CASES = [
    (2, 2, 0, 1, False),
    (3, 2, 1, 1, False),
    (3, 2, 1, 1, True),
    (2, 3, 1, 2, True),
    (3, 1, 1, 2, False),
]
# kernel, stride, padding, ceil_mode, whether padding counts, divisor
AVG_CASES = [
    (2, 2, 0, False, True, None),
    (3, 2, 1, True, True, None),
    (3, 2, 1, True, False, None),
    (3, 1, 1, False, False, 5),
]


def with_backward(name, x, *args):
    """A pool for its largest values, and its gradient."""
    op = getattr(A, name).default
    yield op, x, *args
    out, indices = op(x, *args)
    yield getattr(A, f"{name}_backward").default, torch.randn_like(out), x, *args, indices


@values
def test_max_pool():
    for n, (k, s, p, d, ceil) in ((1, MAX_CASES[1]), *((2, case) for case in MAX_CASES), (3, MAX_CASES[3])):
        x, args = torch.randn(2, 3, *SIZES[:n]).round(decimals=1), ([k] * n, [s] * n, [p] * n, [d] * n, ceil)
        if n > 1:
            yield from with_backward(f"max_pool{n}d_with_indices", x, *args)
        else:
            yield A.max_pool1d_with_indices.default, x, *args
    x = torch.randn(1, 6, 6)
    x[0, 2, 3], x[0, 0, 0] = math.nan, -math.inf
    yield A.max_pool2d_with_indices.default, x, [3, 3], [2, 2], [1, 1]
    yield A.max_pool2d_with_indices.default, torch.full((1, 4, 4), -math.inf), [2, 2], [2, 2], [1, 1]
    yield A.max_pool2d_with_indices.default, torch.randint(0, 9, (2, 4, 4)), [2, 2]
    yield A.max_pool2d_with_indices.default, torch.randn(2, 4, 4, dtype=torch.bfloat16), [2, 2]
    yield A.max_pool2d_with_indices.default, torch.randn(0, 3, 4, 4), [2, 2]
    x = torch.randn(2, 16, 14)
    x[0, 5, 5] = math.nan
    yield from with_backward("max_pool2d_with_indices", x, [10, 10], [3, 3], [2, 2], [1, 1], True)
    x = torch.randn(2, 3, 8, 8)
    yield A.max_unpool2d.default, *A.max_pool2d_with_indices.default(x, [2, 2]), [8, 8]


@values
def test_maxima_of_what_compares_with_nothing():
    """Of several NaN the last is chosen, of equals the first; padding never."""
    for value in (math.nan, -math.inf):
        for everywhere in (True, False):

            def example(*sizes, value=value, everywhere=everywhere):
                x = torch.randn(2, *sizes)
                x[torch.full_like(x, everywhere, dtype=torch.bool) | (x > 0)] = value
                return x

            for n in (2, 3):
                x = example(*(5,) * n)
                for k, s, p, d, ceil in MAX_CASES:
                    args = ([k] * n, [s] * n, [p] * n, [d] * n, ceil)
                    yield getattr(A, f"max_pool{n}d_with_indices").default, x, *args
                yield getattr(A, f"adaptive_max_pool{n}d").default, x, [3] * n
                fractional = getattr(A, f"fractional_max_pool{n}d").default
                yield fractional, x[None], [2] * n, [3] * n, torch.full((1, 2, n), 0.4)
            yield A.max_pool2d_with_indices.default, example(16, 14), [10, 10], [3, 3], [2, 2], [1, 1], True


@values
def test_avg_pool():
    for n, case in (*((2, c) for c in AVG_CASES), (3, AVG_CASES[2])):
        k, s, p, *rest = case
        x, args = torch.randn(2, 3, *SIZES[:n]), ([k] * n, [s] * n, [p] * n, *rest)
        op = getattr(A, f"avg_pool{n}d").default
        yield op, x, *args
        yield getattr(A, f"avg_pool{n}d_backward").default, torch.randn_like(op(x, *args)), x, *args
    yield A.avg_pool1d.default, torch.randn(2, 3, 9), [3], [2], [1]
    yield A.avg_pool2d.default, torch.randn(2, 3, 9, 9, dtype=torch.bfloat16), [3, 3]
    yield A.avg_pool2d.default, torch.randn(3, 14, 14), [10, 10], [2, 2], [3, 3], True, False
    yield A.avg_pool2d.default, torch.randint(0, 99, (1, 8, 8)), [3, 3], [2, 2]
    whole, given = torch.randint(-99, 99, (2, 3, 3)), torch.ones(2, 8, 8, dtype=torch.int64)
    yield A.avg_pool2d_backward.default, whole, given, [3, 3], [2, 2], [0], False, True, None
    yield A.avg_pool2d_backward.default, given * 7, given, [1], [1], [0], False, False, None
    yield A.avg_pool2d_backward.default, given[:, :1, :1] * 99, given, [8, 8], [8, 8], [0], False, False, None


@values
def test_adaptive_pool():
    for n, out in ((2, 1), (2, 2), (2, 7), (3, 5)):
        x, grad = torch.randn(2, 3, *SIZES[:n]), torch.randn(2, 3, *[out] * n)
        yield getattr(A, f"_adaptive_avg_pool{n}d").default, x, [out] * n
        yield getattr(A, f"_adaptive_avg_pool{n}d_backward").default, grad, x
        maximum = getattr(A, f"adaptive_max_pool{n}d").default
        yield maximum, x, [out] * n
        yield getattr(A, f"adaptive_max_pool{n}d_backward").default, grad, x, maximum(x, [out] * n)[1]
    yield A.adaptive_avg_pool1d.default, torch.randn(2, 3, 10), [4]
    yield A.adaptive_max_pool1d.default, torch.randn(2, 3, 10), [4]
    yield A.adaptive_max_pool2d.default, torch.ones(2, 6, 6), [4, 3]  # ties
