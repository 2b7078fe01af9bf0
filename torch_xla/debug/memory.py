"""Which tensors hold a device's memory, and which line of the program made them.

Example::

    for kind in torch_xla.debug.memory.live_tensors()[:10]:
        print(kind)  # 48.0 MiB: float32[1024, 4096] × 3, made at train.py:41 in step

``XLA_MEMORY_LIMIT_MB`` makes a graph that needs more raise `torch.OutOfMemoryError` before it runs, on a CPU too.
"""

from __future__ import annotations

import torch

from torch_xla import _bindings
from torch_xla._core.device import memory_stats
from torch_xla._core.device.memory_stats import LiveTensors as LiveTensors

__all__ = ["LiveTensors", "live_tensors"]


def live_tensors(device: torch.device | str | int | None = None) -> list[LiveTensors]:
    """The tensors that hold memory of a device, those of one kind and line together, largest first.

    Args:
        device: The device, its name or its index; the current one by default.
    """
    index = device if isinstance(device, int) else torch.device(device or "xla").index
    return memory_stats.live_tensors(_bindings.current_device() if index is None else index)
