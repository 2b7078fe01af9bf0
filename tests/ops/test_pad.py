"""Padding, and the patches of `unfold` and `fold`."""

from __future__ import annotations

import pytest
import torch
from harness import check

A = torch.ops.aten
TOL = {"rtol": 1e-5, "atol": 1e-5}


@pytest.mark.parametrize("pad", [[1, 2], [1, 2, 0, 3], [-1, 2, 1, -1]])
@pytest.mark.parametrize("value", [0, 2.5])
def test_constant_pad(pad, value):
    check(A.constant_pad_nd.default, torch.randn(3, 4, 5), pad, value)


def test_constant_pad_of_other_types():
    check(A.constant_pad_nd.default, torch.arange(4), [1, 1], 7)
    check(A.constant_pad_nd.default, torch.tensor([True]), [1, 1], 1)
    check(A.constant_pad_nd.default, torch.randn(2, dtype=torch.bfloat16), [0, 3], 1.5)


@pytest.mark.parametrize("kind", ["reflection", "replication"])
@pytest.mark.parametrize(("n", "pads"), [(1, (3, 0)), (2, (1, 2)), (2, (-1, 2)), (3, (1, 2))], ids=str)
def test_border_pads(kind, n, pads):
    x = torch.randn(2, 3, *[4, 5, 6][:n])
    pad = list(pads) * n
    op = getattr(A, f"{kind}_pad{n}d").default
    check(op, x, pad)
    if min(pads) >= 0:
        check(getattr(A, f"{kind}_pad{n}d_backward").default, torch.randn_like(op(x, pad)), x, pad, **TOL)


@pytest.mark.parametrize("case", [([2, 3], [1, 1], [0, 0], [1, 1]), ([3, 2], [2, 1], [1, 2], [2, 3])], ids=str)
def test_patches(case):
    x = torch.randn(2, 3, 8, 9)
    check(A.im2col.default, x, *case)
    columns = A.im2col.default(x, *case)
    check(A.col2im.default, columns, [8, 9], *case, **TOL)
    check(A.im2col.default, x[0], *case)
    check(A.col2im.default, columns[0], [8, 9], *case, **TOL)
