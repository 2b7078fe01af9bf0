"""Padding, and the patches of `unfold` and `fold`."""

from __future__ import annotations

import torch
from harness import values

A = torch.ops.aten


@values
def test_pads():
    for pad in ([1, 2], [1, 2, 0, 3], [-1, 2, 1, -1]):
        for value in (0, 2.5):
            yield A.constant_pad_nd.default, torch.randn(3, 4, 5), pad, value
    yield A.constant_pad_nd.default, torch.arange(4), [1, 1], 7
    yield A.constant_pad_nd.default, torch.tensor([True]), [1, 1], 1
    yield A.constant_pad_nd.default, torch.randn(2, dtype=torch.bfloat16), [0, 3], 1.5
    for kind in ("reflection", "replication"):
        for n, pads in ((1, (3, 0)), (2, (1, 2)), (2, (-1, 2)), (3, (1, 2))):
            x, pad = torch.randn(2, 3, *[4, 5, 6][:n]), list(pads) * n
            op = getattr(A, f"{kind}_pad{n}d").default
            yield op, x, pad
            if min(pads) >= 0:
                yield getattr(A, f"{kind}_pad{n}d_backward").default, torch.randn_like(op(x, pad)), x, pad


@values
def test_patches():
    for case in (([2, 3], [1, 1], [0, 0], [1, 1]), ([3, 2], [2, 1], [1, 2], [2, 3])):
        x = torch.randn(2, 3, 8, 9)
        columns = A.im2col.default(x, *case)
        for image, patches in ((x, columns), (x[0], columns[0])):
            yield A.im2col.default, image, *case
            yield A.col2im.default, patches, [8, 9], *case
