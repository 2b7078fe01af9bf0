"""Makes ``xla`` the accelerator of the process, for `torch.accelerator` and PyTorch's defaults.

PyTorch finds its accelerator in C++, where ``xla`` cannot be registered as one. So functions of `torch._C` that Python
calls are replaced, if a program asks for it. C++ itself, as in ``torch.device(0)``, finds no accelerator all the same.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_xla import _bindings
from torch_xla._core.device import client
from torch_xla._errors import message

HOW = "call torch_xla.experimental.use_as_accelerator() before, or set XLA_USE_AS_ACCELERATOR=1"
_on = False
_registered: list[torch.library.Library] = []


def on() -> bool:
    """Whether xla is the accelerator of this process."""
    return _on


def _current(*_: Any) -> torch.device:
    return torch.device("xla")


def _exchange(index: int) -> int:
    before: int = _bindings.current_device()
    if index >= 0:
        torch.xla.set_device(index)  # type: ignore[attr-defined]
    return before


def _statistics(index: int) -> dict[str, Any]:
    used = {"current": torch.xla.memory_allocated(index), "peak": torch.xla.max_memory_allocated(index)}  # type: ignore[attr-defined]
    return {"allocated_bytes": {"all": used}, "reserved_bytes": {"all": used}}


def _nothing(*_: Any) -> None:
    """The runtime keeps no memory that could be given back, and its peaks cannot be set back."""


def _pin(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    if not _on:
        raise RuntimeError(message("memory", "pin_memory() in a process without an accelerator", do=HOW))
    return tensor.clone()  # transfers start from any memory of the host


def know_pinning() -> None:
    """Makes `pin_memory` pin for xla, if there is no other accelerator."""
    if not _registered and torch.accelerator.current_accelerator() in (None, _current()):
        library = torch.library.Library("aten", "IMPL", "CPU")
        library.impl("_pin_memory", _pin)
        _registered.append(library)


def install() -> None:
    """Makes xla the accelerator of this process."""
    global _on
    _on = True
    module: Any = torch.xla  # type: ignore[attr-defined]
    answers = {
        "_get_accelerator": _current,
        "_accelerator_getAccelerator": _current,
        "_accelerator_getDeviceIndex": _bindings.current_device,
        "_accelerator_setDeviceIndex": _exchange,
        "_accelerator_exchangeDevice": _exchange,
        "_accelerator_maybeExchangeDevice": _exchange,
        "_accelerator_getStream": module.current_stream,
        "_accelerator_setStream": module.set_stream,
        "_accelerator_synchronizeDevice": module.synchronize,
        "_accelerator_isAllocatorInitialized": client.client_started,
        "_accelerator_getDeviceStats": _statistics,
        "_accelerator_getMemoryInfo": module.mem_get_info,
        "_accelerator_emptyCache": _nothing,
        "_accelerator_emptyHostCache": _nothing,
        "_accelerator_resetAccumulatedStats": _nothing,
        "_accelerator_resetPeakStats": _nothing,
    }
    for name, answer in answers.items():
        setattr(torch._C, name, answer)
    torch._utils._get_available_device_type = lambda: "xla"
    torch.get_device_module.cache_clear()  # the default may have been asked for
    know_pinning()
