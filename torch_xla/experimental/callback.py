"""Being told when a tensor's values are there, without waiting for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import torch

from torch_xla._core.device import background
from torch_xla._core.execute import barrier as _barrier


def on_ready_callback(tensor: torch.Tensor, callback: Callable[[torch.Tensor], None]) -> None:
    """Calls a function once a tensor's values are on its device; what computes them is started first.

    Args:
        tensor: A tensor on an XLA device.
        callback: Called with the tensor, in a thread of its own; also if the program failed.
    """
    buffer = _barrier.buffers([tensor])[0]

    def wait() -> None:
        with suppress(RuntimeError):  # it failed, which whoever reads the tensor is told
            buffer.block_until_ready()
        callback(tensor)

    background.start("callback", wait)


def on_ready_event(tensor: torch.Tensor) -> threading.Event:
    """An event that is set once a tensor's values are on its device.

    Args:
        tensor: A tensor on an XLA device.
    """
    event = threading.Event()
    on_ready_callback(tensor, lambda _: event.set())
    return event
