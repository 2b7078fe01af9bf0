"""Lets optimizers and what clips gradients take tensors on ``xla`` by lists, as PyTorch does on GPUs.

A list is updated by a few calls in place of some for each parameter, and with ``fused=True`` by one.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch
import torch.utils._foreach_utils as lists

_SUPPORTED = {
    "_get_fused_kernels_supported_devices",
    "_get_foreach_kernels_supported_devices",
    "_get_capturable_supported_devices",  # where they have `xla`, it is left out for lists
}


def _with_xla(devices: Callable[..., list[str]]) -> Callable[..., list[str]]:
    @functools.wraps(devices)
    def wrapper(*args: bool, **kwargs: bool) -> list[str]:
        return list(dict.fromkeys([*devices(*args, **kwargs), "xla"]))

    return wrapper


def install() -> None:
    """Adds ``xla`` to the devices with such kernels: functions inside PyTorch that have no registration."""
    optimizers = [module for name, module in sys.modules.items() if name.startswith(f"{torch.optim.__name__}.")]
    for module in (*optimizers, lists):
        for name in vars(module).keys() & _SUPPORTED:
            setattr(module, name, _with_xla(getattr(module, name)))
