"""Lets optimizers with ``fused=True`` run on ``xla``, where a fused step is one operation of the graph."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch.optim.optimizer as base


def _with_xla(devices: Callable[[], list[str]]) -> Callable[[], list[str]]:
    @functools.wraps(devices)
    def wrapper() -> list[str]:
        return [*devices(), "xla"]

    return wrapper


def install() -> None:
    """Adds ``xla`` to the devices with fused kernels, a list inside PyTorch that has no registration."""
    base._get_fused_kernels_supported_devices = _with_xla(  # type: ignore[attr-defined]
        base._get_fused_kernels_supported_devices  # type: ignore[attr-defined]
    )
