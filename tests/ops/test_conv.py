"""Convolutions and their gradients."""

from __future__ import annotations

import jax
import pytest
import torch
from harness import check, lower, values

from torch_xla._core.execute import export

A = torch.ops.aten
# n, channels in, channels out, kernel, stride, padding, dilation, transposed, output padding, groups
CASES = [
    (1, 4, 8, 3, 1, 0, 1, False, 0, 1),
    (1, 4, 8, 3, 2, 1, 2, False, 0, 2),
    (1, 4, 8, 3, 2, 1, 1, True, 1, 2),
    (2, 4, 8, 3, 3, 2, 1, False, 0, 4),
    (2, 32, 4, 3, 2, 1, 2, False, 0, 1),
    (2, 32, 4, 1, 1, 0, 1, False, 0, 1),
    (2, 4, 8, 3, 2, 3, 1, True, 1, 1),
    (2, 4, 8, 3, 3, 0, 2, True, 2, 4),
    (3, 4, 8, 3, 2, 1, 1, False, 0, 2),
    (3, 4, 8, 3, 2, 1, 1, True, 1, 1),
]


def example(n, c, o, k, s, p, d, transposed, output_padding, groups, dtype=torch.float32):
    weight = (c, o // groups) if transposed else (o, c // groups)
    x = torch.randn(2, c, *[8, 9, 10][:n], dtype=dtype)
    w = torch.randn(*weight, *[k, k, k][:n], dtype=dtype)
    return x, w, torch.randn(o, dtype=dtype), ([s] * n, [p] * n, [d] * n, transposed, [output_padding] * n, groups)


@values
def test_values():
    half = example(2, 4, 8, 3, 2, 1, 1, False, 0, 1, dtype=torch.bfloat16)
    for x, w, b, rest in (*(example(*case) for case in CASES), half):
        yield A.convolution.default, x, w, b, *rest
        grad = torch.randn_like(A.convolution.default(x, w, b, *rest))
        yield A.convolution_backward.default, grad, x, w, list(b.shape), *rest, [True, True, True]
    _, w, b, rest = example(2, 4, 8, 3, 1, 1, 1, False, 0, 1)
    yield A.convolution.default, torch.randn(0, 4, 6, 6), w, b, *rest


@pytest.mark.parametrize("case", CASES, ids=str)
def test_integers_on_tpus_are_those_of_cpus(case, monkeypatch):
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *arrays, tpu, **others: tpu(*arrays))
    x, w, b, rest = example(*case)
    x, w, b = ((10 * t).long() for t in (x, w, b))
    check(A.convolution.default, x * 2**40, w, b, *rest)


@pytest.mark.parametrize(("platform", "convolutions"), [("cuda", 2), ("tpu", 0)])
def test_tpus_get_no_convolutions_of_64_bit_integers(platform, convolutions):
    x, w = (torch.ones(2, 2, size, size, dtype=torch.int64, device="xla") for size in (4, 2))
    both = [torch.conv2d(x, w), torch.conv_transpose2d(x, w)]
    text = export.lowered(both, "graph", platform).stage.as_text()
    assert text.count("stablehlo.convolution") == convolutions


def test_unwanted_gradients_are_none():
    x, w, b, rest = example(2, 4, 8, 3, 1, 0, 1, False, 0, 1)
    grad = torch.randn_like(A.convolution.default(x, w, b, *rest))
    results = lower(A.convolution_backward.default, grad, x, w, [8], *rest, [False, True, False])
    assert [r is None for r in results] == [True, False, True]
