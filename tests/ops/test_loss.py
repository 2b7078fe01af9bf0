"""Loss functions and their derivatives."""

from __future__ import annotations

import pytest
import torch
from harness import check

A = torch.ops.aten
REDUCTIONS = pytest.mark.parametrize("reduction", [0, 1, 2], ids=["none", "mean", "sum"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
X, TARGET = torch.randn(4, 3), torch.randn(4, 3)
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.bfloat16: {"rtol": 0.02, "atol": 0.02}}


def gradient(loss):
    return torch.rand_like(loss) + 0.5


DISTANCES = [
    ("mse_loss", ()),
    ("smooth_l1_loss", (0.5,)),
    ("smooth_l1_loss", (0.0,)),
    ("huber_loss", (0.7,)),
    ("soft_margin_loss", ()),
]


@REDUCTIONS
@DTYPES
@pytest.mark.parametrize("name, args", DISTANCES)
def test_distances(name, args, reduction, dtype):
    x, target = X.to(dtype), TARGET.to(dtype)
    if name == "soft_margin_loss":
        target = target.sign()
    loss = getattr(A, name).default
    check(loss, x, target, reduction, *args, **TOLERANCE[dtype])
    grad = gradient(loss(x, target, reduction, *args))
    check(getattr(A, name + "_backward").default, grad, x, target, reduction, *args, **TOLERANCE[dtype])


def test_distance_of_nothing():
    for reduction in (0, 1, 2):
        check(A.mse_loss.default, torch.zeros(0, 3), torch.zeros(0, 3), reduction)


@REDUCTIONS
@pytest.mark.parametrize("weighted", [False, True])
def test_binary_cross_entropy(reduction, weighted):
    p = torch.tensor([[0.0, 0.3, 0.5], [0.9, 1.0, 0.1]])
    target = torch.tensor([[0.0, 0.3, 1.0], [0.0, 0.0, 1.0]])
    weight = torch.rand(3) if weighted else None
    check(A.binary_cross_entropy.default, p, target, weight, reduction, **TOLERANCE[torch.float32])
    grad = gradient(A.binary_cross_entropy(p, target, weight, reduction))
    args = (grad, p, target, None if weight is None else weight.expand(2, 3), reduction)
    check(A.binary_cross_entropy_backward.default, *args, **TOLERANCE[torch.float32])


@REDUCTIONS
@DTYPES
@pytest.mark.parametrize("weighted", [False, True])
def test_binary_cross_entropy_with_logits(reduction, weighted, dtype):
    x, target = (X * 10).to(dtype), torch.rand(4, 3).to(dtype)
    weights = (torch.rand(3).to(dtype), torch.rand(3).to(dtype)) if weighted else (None, None)
    tolerance = {"rtol": 0.02, "atol": 0.1} if dtype == torch.bfloat16 else TOLERANCE[dtype]
    check(A.binary_cross_entropy_with_logits.default, x, target, *weights, reduction, **tolerance)


@REDUCTIONS
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(4, 3), (3,), (2, 3, 4, 5)], ids=str)
def test_nll(shape, weighted, reduction):
    x = torch.randn(shape).log_softmax(0 if len(shape) == 1 else 1)
    target = torch.randint(0, 3, (shape[0], *shape[2:]) if len(shape) > 1 else ())
    if len(shape) > 1:
        target[0] = -100
    weight = torch.rand(3) if weighted else None
    name = "nll_loss2d" if len(shape) == 4 else "nll_loss"
    forward, backward = getattr(A, name + "_forward").default, getattr(A, name + "_backward").default
    check(forward, x, target, weight, reduction, -100, **TOLERANCE[torch.float32])
    loss, total_weight = forward(x, target, weight, reduction, -100)
    args = (gradient(loss), x, target, weight, reduction, -100, total_weight)
    check(backward, *args, **TOLERANCE[torch.float32])


def test_targets_of_bytes_beside_more_classes_than_they_count():
    x, target = torch.randn(4, 300), torch.tensor([0, 44, 156, 255], dtype=torch.uint8)
    weight = torch.rand(300)

    def loss_and_slope(device):
        logits = x.to(device, copy=True).requires_grad_()
        loss = torch.nn.functional.cross_entropy(logits, target.to(device), weight.to(device))
        return loss.detach().cpu(), torch.autograd.grad(loss, logits)[0].cpu()

    for got, expected in zip(loss_and_slope("xla"), loss_and_slope("cpu"), strict=True):
        torch.testing.assert_close(got, expected)


def test_nll_with_every_target_ignored():
    target = torch.full((4,), -1)
    for reduction in (0, 1, 2):
        check(A.nll_loss_forward.default, X, target, None, reduction, -1)
        grad, total = (torch.ones(4) if reduction == 0 else torch.tensor(1.0)), torch.tensor(0.0)
        check(A.nll_loss_backward.default, grad, X, target, None, reduction, -1, total)


@REDUCTIONS
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_multi_margin(reduction, p, weighted):
    target, weight = torch.tensor([0, 2, 1, 1]), torch.rand(3) if weighted else None
    check(A.multi_margin_loss.default, X, target, p, 0.8, weight, reduction, **TOLERANCE[torch.float32])
    grad = gradient(A.multi_margin_loss(X, target, p, 0.8, weight, reduction))
    args = (grad, X, target, p, 0.8, weight, reduction)
    check(A.multi_margin_loss_backward.default, *args, **TOLERANCE[torch.float32])


@REDUCTIONS
def test_multilabel_margin(reduction):
    target = torch.tensor([[0, 2, -1], [1, -1, 0], [-1, 0, 1], [2, 1, 0]])
    check(A.multilabel_margin_loss_forward.default, X, target, reduction, **TOLERANCE[torch.float32])
    loss, is_target = A.multilabel_margin_loss_forward(X, target, reduction)
    args = (gradient(loss), X, target, reduction, is_target)
    check(A.multilabel_margin_loss_backward.default, *args, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_gradients_by_integers(reduction, size):
    grad, x, target = torch.randint(-9, 9, (3, size))
    check(A.mse_loss_backward.default, grad, x, target, reduction)
    check(A.smooth_l1_loss_backward.default, grad, x, target, reduction, 1.0)
