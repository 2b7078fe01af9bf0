"""Loss functions and their derivatives."""

from __future__ import annotations

import torch
from agreement import closely, on_both
from harness import values

A = torch.ops.aten
REDUCTIONS = (0, 1, 2)  # none, mean, sum
X, TARGET = torch.randn(4, 3), torch.randn(4, 3)


def gradient(loss):
    return torch.rand_like(loss) + 0.5


def both(name, x, target, *args, weight=(), backward_weight=None):
    """A loss and its derivative."""
    loss = getattr(A, name).default
    yield loss, x, target, *weight, *args
    grad = gradient(loss(x, target, *weight, *args))
    yield getattr(A, f"{name}_backward").default, grad, x, target, *(backward_weight or weight), *args


@values
def test_distances():
    for dtype in (torch.float32, torch.bfloat16):
        x, target = X.to(dtype), TARGET.to(dtype)
        for reduction in REDUCTIONS:
            yield from both("mse_loss", x, target, reduction)
            yield from both("smooth_l1_loss", x, target, reduction, 0.5)
            yield from both("smooth_l1_loss", x, target, reduction, 0.0)
            yield from both("huber_loss", x, target, reduction, 0.7)
            yield from both("soft_margin_loss", x, target.sign(), reduction)
    for reduction in REDUCTIONS:
        yield A.mse_loss.default, torch.zeros(0, 3), torch.zeros(0, 3), reduction
        for size in (1, 2, 3):
            grad, x, target = torch.randint(-9, 9, (3, size))
            yield A.mse_loss_backward.default, grad, x, target, reduction
            yield A.smooth_l1_loss_backward.default, grad, x, target, reduction, 1.0


@values
def test_binary_cross_entropy():
    p = torch.tensor([[0.0, 0.3, 0.5], [0.9, 1.0, 0.1]])
    target = torch.tensor([[0.0, 0.3, 1.0], [0.0, 0.0, 1.0]])
    for reduction in REDUCTIONS:
        yield from both("binary_cross_entropy", p, target, reduction, weight=(None,))
        weight = torch.rand(3)
        wide = (weight.expand(2, 3),)
        yield from both("binary_cross_entropy", p, target, reduction, weight=(weight,), backward_weight=wide)
        for dtype in (torch.float32, torch.bfloat16):
            for weights in ((None, None), (torch.rand(3).to(dtype), torch.rand(3).to(dtype))):
                x, target_of = (X * 10).to(dtype), torch.rand(4, 3).to(dtype)
                yield A.binary_cross_entropy_with_logits.default, x, target_of, *weights, reduction


@values
def test_classes():
    for reduction in REDUCTIONS:
        for weight in (None, torch.rand(3)):
            for shape in ((4, 3), (3,), (2, 3, 4, 5)):
                x = torch.randn(shape).log_softmax(0 if len(shape) == 1 else 1)
                target = torch.randint(0, 3, (shape[0], *shape[2:]) if len(shape) > 1 else ())
                if len(shape) > 1:
                    target[0] = -100
                name = "nll_loss2d" if len(shape) == 4 else "nll_loss"
                forward, backward = getattr(A, f"{name}_forward").default, getattr(A, f"{name}_backward").default
                yield forward, x, target, weight, reduction, -100
                loss, total_weight = forward(x, target, weight, reduction, -100)
                yield backward, gradient(loss), x, target, weight, reduction, -100, total_weight
            for p in (1, 2):
                yield from both("multi_margin_loss", X, torch.tensor([0, 2, 1, 1]), p, 0.8, weight, reduction)
        target = torch.tensor([[0, 2, -1], [1, -1, 0], [-1, 0, 1], [2, 1, 0]])
        yield A.multilabel_margin_loss_forward.default, X, target, reduction
        loss, is_target = A.multilabel_margin_loss_forward(X, target, reduction)
        yield A.multilabel_margin_loss_backward.default, gradient(loss), X, target, reduction, is_target
        target = torch.full((4,), -1)  # all are ignored
        yield A.nll_loss_forward.default, X, target, None, reduction, -1
        grad, total = (torch.ones(4) if reduction == 0 else torch.tensor(1.0)), torch.tensor(0.0)
        yield A.nll_loss_backward.default, grad, X, target, None, reduction, -1, total


@on_both(closely)
def test_targets_of_bytes_beside_more_classes_than_they_count(device):
    x, weight = torch.randn(4, 300).to(device).requires_grad_(), torch.rand(300).to(device)
    target = torch.tensor([0, 44, 156, 255], dtype=torch.uint8).to(device)
    loss = torch.nn.functional.cross_entropy(x, target, weight)
    return loss, *torch.autograd.grad(loss, x)
