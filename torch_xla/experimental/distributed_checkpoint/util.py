"""An optimizer's state before its first step: a checkpoint is read into what is there."""

from __future__ import annotations

import torch

import torch_xla
from torch_xla._core.device import shardings
from torch_xla._core.execute import parts
from torch_xla.core import xla_model as xm
from torch_xla.distributed.spmd import marking


def prime_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Makes an optimizer's state, sharded as its parameters, by a step with gradients of zero.

    That step may change the parameters, so it is for those that are read from a checkpoint next.

    Args:
        optimizer: The optimizer; it is given back.
    """
    torch_xla.sync()
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param.requires_grad:
                param.grad = torch.zeros_like(param, requires_grad=False)
                number = parts.number_of(param.detach())
                if shardings.text_of(number):
                    marking.mark(param.grad, number)
    optimizer.step()
    torch_xla.sync()
    xm.wait_device_ops()
    return optimizer
