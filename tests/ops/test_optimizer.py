"""Fused optimizer steps and loss scaling."""

from __future__ import annotations

import math

import pytest
import torch
from harness import lower, values

A = torch.ops.aten


def tensors(*shapes):
    return [torch.randn(shape) for shape in shapes]


def states(*shapes):
    return [torch.rand(shape) for shape in shapes]


SHAPES = ((3, 4), (5,))
STEPS = [torch.tensor(3.0), torch.tensor(3.0)]
SCALING = [(None, None), (torch.tensor(4.0), torch.tensor(0.0)), (torch.tensor(4.0), torch.tensor(1.0))]


@values
def test_steps():
    numbers = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "lr": 0.01}
    for op in (A._fused_adam.default, A._fused_adamw.default):
        for amsgrad in (False, True):
            for scale, found_inf in SCALING:
                given = tensors(*SHAPES), tensors(*SHAPES), tensors(*SHAPES), states(*SHAPES)
                largest = states(*SHAPES) if amsgrad else []
                options = {"amsgrad": amsgrad, "maximize": amsgrad, "grad_scale": scale, "found_inf": found_inf}
                yield op, *given, largest, STEPS, numbers | options
    for first in (False, True):
        for nesterov in (False, True):
            for scale, found_inf in SCALING[:2]:
                kwargs = {"weight_decay": 0.1, "momentum": 0.9, "lr": 0.1, "nesterov": nesterov}
                kwargs |= {"dampening": 0.0 if nesterov else 0.5, "maximize": nesterov, "is_first_step": first}
                kwargs |= {"grad_scale": scale, "found_inf": found_inf}
                yield A._fused_sgd.default, tensors(*SHAPES), tensors(*SHAPES), tensors(*SHAPES), kwargs
    kwargs = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0}
    kwargs |= {"nesterov": False, "maximize": False, "is_first_step": True}
    yield A._fused_sgd.default, tensors(*SHAPES), tensors(*SHAPES), [], kwargs
    kwargs = {"lr": 0.1, "lr_decay": 0.01, "weight_decay": 0.1, "eps": 1e-10, "maximize": False}
    yield A._fused_adagrad.default, tensors(*SHAPES), tensors(*SHAPES), states(*SHAPES), STEPS, kwargs
    for value in (1.0, math.inf, math.nan):
        grads = [torch.tensor([2.0, value]), torch.randn(3)]
        yield A._amp_foreach_non_finite_check_and_unscale.default, grads, torch.zeros(1), torch.tensor([0.5])


@pytest.mark.parametrize(
    "tracker, found, scale, expected",
    [(0, 0.0, 8.0, (8.0, 1)), (4, 0.0, 8.0, (16.0, 0)), (2, 1.0, 8.0, (4.0, 0)), (4, 0.0, 3e38, (3e38, 0))],
    ids=["wait", "grow", "back off", "at the limit"],
)
def test_update_scale(tracker, found, scale, expected):
    args = (torch.tensor([scale]), torch.tensor([tracker], dtype=torch.int32), torch.tensor([found]), 2.0, 0.5, 5)
    new_scale, new_tracker = lower(A._amp_update_scale.default, *args)
    assert (new_scale.item(), new_tracker.item()) == pytest.approx(expected)
