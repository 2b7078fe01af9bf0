"""Makes optimizers and gradient clipping on ``xla`` take tensors by lists (foreach), as on GPUs.

A list is updated by a few calls in place of some per parameter, and with ``fused=True`` by one.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._foreach_utils as lists
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from torch_xla._core.device import client, shardings
from torch_xla._core.execute import parts

_SUPPORTED = {
    "_get_fused_kernels_supported_devices",
    "_get_foreach_kernels_supported_devices",
    "_get_capturable_supported_devices",  # where they have `xla`, it is left out for lists
}


# The state of each optimizer that was looked through for what its parameters' splits say.
_split: weakref.WeakKeyDictionary[Optimizer, Any] = weakref.WeakKeyDictionary()


def _with_xla(devices: Callable[..., list[str]]) -> Callable[..., list[str]]:
    @functools.wraps(devices)
    def wrapper(*args: bool, **kwargs: bool) -> list[str]:
        return list(dict.fromkeys([*devices(*args, **kwargs), "xla"]))

    return wrapper


def _fill_momentum(optimizer: torch.optim.SGD) -> None:
    """Starts momentum at zero, so that the first step has the same graph as the others.

    SGD takes the first gradient as the buffer, which equals zero momentum plus that gradient unless it is dampened.
    """
    state = optimizer.state
    for group in optimizer.param_groups:
        if not group["momentum"] or group["dampening"] or group.get("differentiable"):
            continue
        for param in group["params"]:
            if param.grad is None or param.device.type != "xla" or param.grad.is_sparse:
                continue
            if state[param].get("momentum_buffer") is None:
                state[param]["momentum_buffer"] = torch.zeros_like(param, memory_format=torch.preserve_format)


def _split_loaded(optimizer: Optimizer) -> None:
    """Shards a loaded optimizer state as its parameters; state that a step made is sharded already."""
    for param, state in optimizer.state.items():
        if not isinstance(param, torch.Tensor) or param.device.type != "xla":
            continue
        number = parts.number_of(param)
        if number <= shardings.MANUAL:
            continue
        for value in state.values():
            same_type = isinstance(value, torch.Tensor) and value.device.type == "xla" and value.shape == param.shape
            if same_type and parts.number_of(value) <= shardings.EXPLICITLY_REPLICATED:
                parts.place(value, number, recorded=True)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if client.spmd() and _split.get(optimizer) is not optimizer.state:  # loading gives it another
        _split_loaded(optimizer)
        _split[optimizer] = optimizer.state
    if isinstance(optimizer, torch.optim.SGD) and len(optimizer.state) < sum(
        len(group["params"]) for group in optimizer.param_groups if group["momentum"]
    ):
        _fill_momentum(optimizer)


def install() -> None:
    """Adds ``xla`` to the devices with such kernels, which functions inside PyTorch list, and hooks steps."""
    optimizers = [module for name, module in sys.modules.items() if name.startswith(f"{torch.optim.__name__}.")]
    for module in (*optimizers, lists):
        for name in vars(module).keys() & _SUPPORTED:
            setattr(module, name, _with_xla(getattr(module, name)))
    register_optimizer_step_pre_hook(_before_step)
