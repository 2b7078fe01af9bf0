"""Normalization."""

from __future__ import annotations

import pytest
import torch
from harness import lower, values

A = torch.ops.aten


@values
def test_layers():
    for dtype, shape, affine in (
        *((torch.float32, [4], True), (torch.float32, [3, 4], True), (torch.bfloat16, [4], True)),
        (torch.float32, [4], False),
    ):
        x = (torch.randn(2, 3, 4) + 10).to(dtype)
        w, b = (torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)) if affine else (None, None)
        yield A.native_layer_norm.default, x, shape, w, b, 1e-5
        _, mean, rstd = A.native_layer_norm.default(x, shape, w, b, 1e-5)
        grad, expected = torch.randn(2, 3, 4).to(dtype), [True, affine, affine]
        yield A.native_layer_norm_backward.default, grad, x, shape, mean, rstd, w, b, expected
    for dtype, affine in ((torch.float32, True), (torch.bfloat16, True), (torch.float32, False)):
        x = torch.randn(2, 6, 5, 4).to(dtype)
        w, b = (torch.randn(6, dtype=dtype), torch.randn(6, dtype=dtype)) if affine else (None, None)
        yield A.native_group_norm.default, x, w, b, 2, 6, 20, 3, 1e-5
        _, mean, rstd = A.native_group_norm.default(x, w, b, 2, 6, 20, 3, 1e-5)
        grad, expected = torch.randn(2, 6, 5, 4).to(dtype), [True, affine, affine]
        yield A.native_group_norm_backward.default, grad, x, mean, rstd, w, 2, 6, 20, 3, expected
    for dim in (0, 2):
        v = torch.randn(3, 4, 5)
        g = torch.randn([n if d == dim else 1 for d, n in enumerate(v.shape)])
        yield A._weight_norm_interface.default, v, g, dim
        _, norms = A._weight_norm_interface.default(v, g, dim)
        yield A._weight_norm_interface_backward.default, torch.randn(3, 4, 5), v, g, norms, dim
    for order in (1.0, 2.0, 3.0):
        weight, indices = torch.randn(5, 4) * 3, torch.tensor([[0, 3], [3, 1]])
        yield A.embedding_renorm.default, weight, indices, 1.0, order
    for order in (0.5, 1.0, 2.0, float("inf")):
        yield A.renorm.default, torch.randn(3, 4, 5), order, -2, 1.5
    for dtype, eps in ((torch.float32, None), (torch.bfloat16, 1e-6)):
        yield A._fused_rms_norm.default, torch.randn(2, 3, 4, dtype=dtype), [4], torch.randn(4, dtype=dtype), eps


def batch(shape=(4, 3, 5, 2), dtype=torch.float32):
    x = torch.randn(shape).to(dtype)
    return x, torch.randn(3), torch.randn(3), torch.randn(3), torch.rand(3) + 0.5


@values
def test_batch_norm():
    for training in (True, False):
        for shape in ((4, 3), (4, 3, 5, 2), (2, 3, 4)):
            x, w, b, mean, var = batch(shape)
            rest = (training, 0.1, 1e-5)
            yield A._native_batch_norm_legit_functional.default, x, w, b, mean, var, *rest
            yield A._native_batch_norm_legit_functional.default, x, None, None, mean, var, *rest
            yield A.native_batch_norm.default, x, w, b, mean.clone(), var.clone(), *rest
            _, save_mean, save_rstd = A.native_batch_norm.default(x, w, b, mean.clone(), var.clone(), *rest)
            args = (x, w, mean, var, save_mean, save_rstd, training, 1e-5, [True, True, True])
            yield A.native_batch_norm_backward.default, torch.randn(shape), *args
    x, w, b, mean, var = batch()
    yield A._native_batch_norm_legit_no_training.default, x, w, b, mean, var, 0.1, 1e-5
    yield A._batch_norm_no_update.default, x, w, b, mean, var, 0.1, 1e-5
    yield A._native_batch_norm_legit.no_stats, x, w, b, True, 0.1, 1e-5
    yield A._batch_norm_with_update_functional.default, x, w, b, mean, var, 0.1, 1e-5
    yield A._native_batch_norm_legit_functional.default, *batch(dtype=torch.bfloat16), True, 0.1, 1e-5


@pytest.mark.parametrize(("dtype", "eps"), [(torch.float32, None), (torch.bfloat16, 1e-6)])
def test_gradient_of_rms_norm(dtype, eps):
    """The CPU has no kernel for it: as autograd has it through the composite."""
    x, w = torch.randn(2, 3, 4, dtype=dtype), torch.randn(4, dtype=dtype)
    grad = torch.randn(2, 3, 4, dtype=dtype)
    x.requires_grad_(), w.requires_grad_()
    expected = torch.autograd.grad(torch.nn.functional.rms_norm(x, [4], w, eps), (x, w), grad)
    _, rstd = A._fused_rms_norm.default(x, [4], w, eps)
    inputs = (grad, x.detach(), [4], rstd.detach(), w.detach(), [True, True])
    near = 3e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(lower(A._fused_rms_norm_backward.default, *inputs), expected, rtol=near, atol=near)
