"""Reads of images at positions that are data."""

from __future__ import annotations

import pytest
import torch
from harness import check

A = torch.ops.aten
TOL = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize(
    ("n", "interpolation", "padding", "align"),
    [(2, 0, 0, False), (2, 0, 1, True), (2, 0, 2, False), (2, 1, 2, True), (2, 2, 1, False), (3, 0, 0, True)],
)
def test_grid_sampler(n, interpolation, padding, align):
    x, grid = torch.randn(2, 3, *[4, 5, 6][:n]), torch.randn(2, *[3, 4, 2][:n], n) * 1.2
    forward = getattr(A, f"grid_sampler_{n}d").default
    check(forward, x, grid, interpolation, padding, align, **TOL)
    grad = torch.randn_like(forward(x, grid, interpolation, padding, align))
    backward = getattr(A, f"grid_sampler_{n}d_backward").default
    check(backward, grad, x, grid, interpolation, padding, align, [True, True], **TOL)


@pytest.mark.parametrize(("n", "out"), [(2, 4), (2, 1), (3, 4)])
def test_fractional_max_pool(n, out):
    x, samples = torch.randn(2, 3, *[9, 10, 11][:n]), torch.rand(2, 3, n)
    forward = getattr(A, f"fractional_max_pool{n}d").default
    check(forward, x, [2] * n, [out] * n, samples)
    values, indices = forward(x, [2] * n, [out] * n, samples)
    backward = getattr(A, f"fractional_max_pool{n}d_backward").default
    check(backward, torch.randn_like(values), x, [2] * n, [out] * n, indices, **TOL)
    check(forward, x[0], [2] * n, [out] * n, samples[:1])
