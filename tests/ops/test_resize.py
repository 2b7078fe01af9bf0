"""Resampling and its gradients."""

from __future__ import annotations

import torch
from harness import values

A = torch.ops.aten
SMOOTH = {
    "upsample_linear1d": 1,
    "upsample_bilinear2d": 2,
    "upsample_trilinear3d": 3,
    "upsample_bicubic2d": 2,
    "_upsample_bilinear2d_aa": 2,
    "_upsample_bicubic2d_aa": 2,
}


def example(n, factor):
    x = torch.randn(2, 3, *[5, 6, 7][:n])
    return x, [int(s * factor) for s in x.shape[2:]]


@values
def test_nearest():
    plain = [("upsample_nearest", n, factor) for n, factor in ((1, 1.5), (2, 2.0), (2, 1.5), (2, 0.6), (3, 2.0))]
    for name, n, factor in (*plain, *(("_upsample_nearest_exact", n, f) for n, f in ((1, 0.6), (2, 1.5), (3, 0.6)))):
        x, size = example(n, factor)
        for scale in (factor, None):
            yield getattr(A, f"{name}{n}d").default, x, size, *[scale] * n
        backward = getattr(A, f"{name}{n}d_backward").default
        yield backward, torch.randn(2, 3, *size), size, list(x.shape), *[None] * n
    yield A.upsample_nearest2d.default, torch.randn(1, 2, 4, 4, dtype=torch.bfloat16), [8, 8], None, None


@values
def test_smooth():
    for name, n in SMOOTH.items():
        for factor, align in ((1.5, True), (0.6, False)):
            x, size = example(n, factor)
            for scale in (None, factor):
                yield getattr(A, name).default, x, size, align, *[scale] * n
            grad = torch.randn(2, 3, *size)
            yield getattr(A, f"{name}_backward").default, grad, size, list(x.shape), align, *[None] * n
        if not name.startswith("_"):  # a scale that changes no size
            x = torch.randn(2, 3, *[3] * (n - 1), 2)
            yield getattr(A, name).default, x, list(x.shape[2:]), False, *[1.3] * n
    yield A.upsample_bilinear2d.default, torch.randn(1, 2, 4, 4, dtype=torch.bfloat16), [7, 7], False, None, None


@values
def test_bytes_are_rounded_and_cut_as_the_cpu_kernel_does():
    for name in [name for name, n in SMOOTH.items() if n == 2]:
        for align in (True, False):
            for size in ((9, 14), (30, 5), (9, 21)):
                for channels in (1, 5):
                    x = torch.randint(0, 2, (2, channels, 9, 14), dtype=torch.uint8) * 255
                    x[0] = torch.randint(0, 256, (channels, 9, 14), dtype=torch.uint8)
                    yield getattr(A, name).default, x, list(size), align, None, None
                    yield getattr(A, name).default, x, list(size), align, *[n / 14 for n in size]
