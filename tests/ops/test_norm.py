"""Normalization."""

from __future__ import annotations

import pytest
import torch
from harness import check, lower

A = torch.ops.aten
TOL = {"rtol": 1e-4, "atol": 1e-4}
HALF = {"rtol": 3e-2, "atol": 3e-2}


def tol(dtype):
    return HALF if dtype == torch.bfloat16 else TOL


def check_promised(op, *args, **tolerance):
    """As `check`, for saved statistics whose dtype or shape on the CPU is not the promised one."""
    for ours, theirs in zip(lower(op, *args), op(*args), strict=True):
        if ours.shape == theirs.shape:
            torch.testing.assert_close(ours, theirs.to(ours.dtype), **tolerance)


@pytest.mark.parametrize(
    ("dtype", "shape", "affine"),
    [
        (torch.float32, [4], True),
        (torch.float32, [3, 4], True),
        (torch.bfloat16, [4], True),
        (torch.float32, [4], False),
    ],
)
def test_layer_norm(dtype, shape, affine):
    x = (torch.randn(2, 3, 4) + 10).to(dtype)
    w, b = (torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)) if affine else (None, None)
    check_promised(A.native_layer_norm.default, x, shape, w, b, 1e-5, **tol(dtype))
    _, mean, rstd = A.native_layer_norm.default(x, shape, w, b, 1e-5)
    grad = torch.randn(2, 3, 4).to(dtype)
    mask = [True, affine, affine]
    check(A.native_layer_norm_backward.default, grad, x, shape, mean, rstd, w, b, mask, **tol(dtype))


@pytest.mark.parametrize(("dtype", "eps"), [(torch.float32, None), (torch.bfloat16, 1e-6)])
def test_rms_norm(dtype, eps):
    x, w = torch.randn(2, 3, 4, dtype=dtype), torch.randn(4, dtype=dtype)
    check(A._fused_rms_norm.default, x, [4], w, eps, **tol(dtype))
    # The CPU has no kernel for the gradient: compare with autograd through the composite.
    grad = torch.randn(2, 3, 4, dtype=dtype)
    x.requires_grad_(), w.requires_grad_()
    expected = torch.autograd.grad(torch.nn.functional.rms_norm(x, [4], w, eps), (x, w), grad)
    _, rstd = A._fused_rms_norm.default(x, [4], w, eps)
    inputs = (grad, x.detach(), [4], rstd.detach(), w.detach(), [True, True])
    for ours, theirs in zip(lower(A._fused_rms_norm_backward.default, *inputs), expected, strict=True):
        torch.testing.assert_close(ours, theirs, **tol(dtype))


@pytest.mark.parametrize(("dtype", "affine"), [(torch.float32, True), (torch.bfloat16, True), (torch.float32, False)])
def test_group_norm(dtype, affine):
    x = torch.randn(2, 6, 5, 4).to(dtype)
    w, b = (torch.randn(6, dtype=dtype), torch.randn(6, dtype=dtype)) if affine else (None, None)
    check(A.native_group_norm.default, x, w, b, 2, 6, 20, 3, 1e-5, **tol(dtype))
    _, mean, rstd = A.native_group_norm.default(x, w, b, 2, 6, 20, 3, 1e-5)
    grad = torch.randn(2, 6, 5, 4).to(dtype)
    mask = [True, affine, affine]
    check(A.native_group_norm_backward.default, grad, x, mean, rstd, w, 2, 6, 20, 3, mask, **tol(dtype))


def batch(shape=(4, 3, 5, 2), dtype=torch.float32):
    x = torch.randn(shape).to(dtype)
    return x, torch.randn(3), torch.randn(3), torch.randn(3), torch.rand(3) + 0.5


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(4, 3), (4, 3, 5, 2), (2, 3, 4)])
def test_batch_norm(training, shape):
    x, w, b, mean, var = batch(shape)
    check_promised(A._native_batch_norm_legit_functional.default, x, w, b, mean, var, training, 0.1, 1e-5, **TOL)
    check_promised(A._native_batch_norm_legit_functional.default, x, None, None, mean, var, training, 0.1, 1e-5, **TOL)
    check_promised(A.native_batch_norm.default, x, w, b, mean.clone(), var.clone(), training, 0.1, 1e-5, **TOL)
    _, save_mean, save_rstd = A.native_batch_norm.default(x, w, b, mean.clone(), var.clone(), training, 0.1, 1e-5)
    grad = torch.randn(shape)
    check(
        A.native_batch_norm_backward.default,
        *(grad, x, w, mean, var, save_mean, save_rstd, training, 1e-5, [True, True, True]),
        **TOL,
    )


def test_batch_norm_variants():
    x, w, b, mean, var = batch()
    check_promised(A._native_batch_norm_legit_no_training.default, x, w, b, mean, var, 0.1, 1e-5, **TOL)
    check_promised(A._batch_norm_no_update.default, x, w, b, mean, var, 0.1, 1e-5, **TOL)
    check(A._native_batch_norm_legit.no_stats, x, w, b, True, 0.1, 1e-5, **TOL)
    check(A._batch_norm_with_update_functional.default, x, w, b, mean, var, 0.1, 1e-5, **TOL)
    x, w, b, mean, var = batch(dtype=torch.bfloat16)
    check_promised(A._native_batch_norm_legit_functional.default, x, w, b, mean, var, True, 0.1, 1e-5, **HALF)


@pytest.mark.parametrize("dim", [0, 2])
def test_weight_norm(dim):
    v = torch.randn(3, 4, 5)
    g = torch.randn([n if d == dim else 1 for d, n in enumerate(v.shape)])
    check(A._weight_norm_interface.default, v, g, dim, **TOL)
    _, norms = A._weight_norm_interface.default(v, g, dim)
    check(A._weight_norm_interface_backward.default, torch.randn(3, 4, 5), v, g, norms, dim, **TOL)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0])
def test_embedding_renorm(order):
    weight, indices = torch.randn(5, 4) * 3, torch.tensor([[0, 3], [3, 1]])
    check(A.embedding_renorm.default, weight, indices, 1.0, order, **TOL)


@pytest.mark.parametrize("order", [0.5, 1.0, 2.0, float("inf")])
def test_renorm(order):
    check(A.renorm.default, torch.randn(3, 4, 5), order, -2, 1.5, **TOL)
