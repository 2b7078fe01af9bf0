"""Reads of images at positions that are data."""

from __future__ import annotations

import torch
from harness import values

A = torch.ops.aten
# Dimensions, interpolation, padding, whether corners are aligned.
GRIDS = [(2, 0, 0, False), (2, 0, 1, True), (2, 0, 2, False), (2, 1, 2, True), (2, 2, 1, False), (3, 0, 0, True)]


@values
def test_grid_sampler():
    for n, *options in GRIDS:
        x, grid = torch.randn(2, 3, *[4, 5, 6][:n]), torch.randn(2, *[3, 4, 2][:n], n) * 1.2
        forward, backward = (getattr(A, f"grid_sampler_{n}d{way}").default for way in ("", "_backward"))
        yield forward, x, grid, *options
        yield backward, torch.randn_like(forward(x, grid, *options)), x, grid, *options, [True, True]


@values
def test_fractional_max_pool():
    for n, out in ((2, 4), (2, 1), (3, 4)):
        x, samples = torch.randn(2, 3, *[9, 10, 11][:n]), torch.rand(2, 3, n)
        sizes = [2] * n, [out] * n
        forward, backward = (getattr(A, f"fractional_max_pool{n}d{way}").default for way in ("", "_backward"))
        yield forward, x, *sizes, samples
        result, indices = forward(x, *sizes, samples)
        yield backward, torch.randn_like(result), x, *sizes, indices
        yield forward, x[0], *sizes, samples[:1]
