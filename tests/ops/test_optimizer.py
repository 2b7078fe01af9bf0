"""Fused optimizer steps and loss scaling."""

from __future__ import annotations

import math

import pytest
import torch
from harness import check, lower

A = torch.ops.aten


def tensors(*shapes):
    return [torch.randn(shape) for shape in shapes]


def states(*shapes):
    return [torch.rand(shape) for shape in shapes]


SHAPES = ((3, 4), (5,))
STEPS = [torch.tensor(3.0), torch.tensor(3.0)]
SCALING = [(None, None), (torch.tensor(4.0), torch.tensor(0.0)), (torch.tensor(4.0), torch.tensor(1.0))]


@pytest.mark.parametrize("name", ["_fused_adam", "_fused_adamw"])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("scale, found_inf", SCALING, ids=["plain", "scaled", "overflow"])
def test_adam(name, amsgrad, scale, found_inf):
    kwargs = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "amsgrad": amsgrad, "maximize": amsgrad}
    args = (
        *(tensors(*SHAPES), tensors(*SHAPES), tensors(*SHAPES), states(*SHAPES)),
        *(states(*SHAPES) if amsgrad else [], STEPS),
    )
    kwargs |= {"grad_scale": scale, "found_inf": found_inf}
    check(getattr(A, name).default, *args, lr=0.01, **kwargs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("scale, found_inf", SCALING[:2], ids=["plain", "scaled"])
def test_sgd(first, nesterov, scale, found_inf):
    args = (tensors(*SHAPES), tensors(*SHAPES), tensors(*SHAPES))
    kwargs = {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.1, "nesterov": nesterov}
    kwargs |= {"dampening": 0.0 if nesterov else 0.5, "maximize": nesterov, "is_first_step": first}
    check(A._fused_sgd.default, *args, **kwargs, grad_scale=scale, found_inf=found_inf, rtol=1e-5, atol=1e-6)


def test_sgd_without_momentum():
    kwargs = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0}
    kwargs |= {"nesterov": False, "maximize": False, "is_first_step": True}
    check(A._fused_sgd.default, tensors(*SHAPES), tensors(*SHAPES), [], **kwargs)


def test_adagrad():
    kwargs = {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.1, "eps": 1e-10, "maximize": False}
    check(A._fused_adagrad.default, tensors(*SHAPES), tensors(*SHAPES), states(*SHAPES), STEPS, **kwargs)


@pytest.mark.parametrize("value", [1.0, math.inf, math.nan])
def test_unscale(value):
    grads = [torch.tensor([2.0, value]), torch.randn(3)]
    check(A._amp_foreach_non_finite_check_and_unscale.default, grads, torch.zeros(1), torch.tensor([0.5]))


@pytest.mark.parametrize(
    "tracker, found, scale, expected",
    [(0, 0.0, 8.0, (8.0, 1)), (4, 0.0, 8.0, (16.0, 0)), (2, 1.0, 8.0, (4.0, 0)), (4, 0.0, 3e38, (3e38, 0))],
    ids=["wait", "grow", "back off", "at the limit"],
)
def test_update_scale(tracker, found, scale, expected):
    args = (torch.tensor([scale]), torch.tensor([tracker], dtype=torch.int32), torch.tensor([found]), 2.0, 0.5, 5)
    new_scale, new_tracker = lower(A._amp_update_scale.default, *args)
    assert (new_scale.item(), new_tracker.item()) == pytest.approx(expected)
