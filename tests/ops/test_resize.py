"""Resampling and its gradients."""

from __future__ import annotations

import pytest
import torch
from harness import check

A = torch.ops.aten
TOL = {"rtol": 1e-4, "atol": 1e-4}


def example(n, factor):
    x = torch.randn(2, 3, *[5, 6, 7][:n])
    return x, [int(s * factor) for s in x.shape[2:]]


@pytest.mark.parametrize(
    ("name", "n", "factor"),
    [
        ("upsample_nearest", 1, 1.5),
        ("upsample_nearest", 2, 2.0),
        ("upsample_nearest", 2, 1.5),
        ("upsample_nearest", 2, 0.6),
        ("upsample_nearest", 3, 2.0),
        ("_upsample_nearest_exact", 1, 0.6),
        ("_upsample_nearest_exact", 2, 1.5),
        ("_upsample_nearest_exact", 3, 0.6),
    ],
)
@pytest.mark.parametrize("use_scale", [True, False])
def test_nearest(name, n, factor, use_scale):
    x, size = example(n, factor)
    scales = [factor if use_scale else None] * n
    check(getattr(A, f"{name}{n}d").default, x, size, *scales)
    if not use_scale:
        grad = torch.randn(2, 3, *size)
        check(getattr(A, f"{name}{n}d_backward").default, grad, size, list(x.shape), *scales, **TOL)


@pytest.mark.parametrize(("factor", "align"), [(1.5, True), (0.6, False)])
@pytest.mark.parametrize(
    ("name", "n"),
    [
        ("upsample_linear1d", 1),
        ("upsample_bilinear2d", 2),
        ("upsample_trilinear3d", 3),
        ("upsample_bicubic2d", 2),
        ("_upsample_bilinear2d_aa", 2),
        ("_upsample_bicubic2d_aa", 2),
    ],
)
def test_smooth(name, n, factor, align):
    x, size = example(n, factor)
    check(getattr(A, name).default, x, size, align, *[None] * n, **TOL)
    check(getattr(A, name).default, x, size, align, *[factor] * n, **TOL)
    grad = torch.randn(2, 3, *size)
    check(getattr(A, f"{name}_backward").default, grad, size, list(x.shape), align, *[None] * n, **TOL)


@pytest.mark.parametrize(("name", "n"), [("linear1d", 1), ("bilinear2d", 2), ("trilinear3d", 3), ("bicubic2d", 2)])
def test_a_scale_that_changes_no_size(name, n):
    x = torch.randn(2, 3, *[3] * (n - 1), 2)
    check(getattr(A, f"upsample_{name}").default, x, list(x.shape[2:]), False, *[1.3] * n, **TOL)


def test_half_types_interpolate_in_float():
    x = torch.randn(1, 2, 4, 4, dtype=torch.bfloat16)
    check(A.upsample_bilinear2d.default, x, [7, 7], False, None, None, rtol=2e-2, atol=2e-2)
    check(A.upsample_nearest2d.default, x, [8, 8], None, None)


@pytest.mark.parametrize("channels", [1, 5])
@pytest.mark.parametrize("size", [(9, 14), (30, 5), (9, 21)])
@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize(
    "name", ["upsample_bilinear2d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"]
)
def test_bytes_are_rounded_and_cut_as_the_cpu_kernel_does(name, align, size, channels):
    x = torch.randint(0, 2, (2, channels, 9, 14), dtype=torch.uint8) * 255
    x[0] = torch.randint(0, 256, (channels, 9, 14), dtype=torch.uint8)
    check(getattr(A, name).default, x, list(size), align, None, None)
    check(getattr(A, name).default, x, list(size), align, *[n / 14 for n in size])
