"""What `torch.load` and `pickle` need to know of ``xla``.

PyTorch restores a tensor by moving its storage first, but a tensor on xla has none that could be moved: its bytes stay
on the host until the tensor is made from them, and are copied then. Tensors that share a storage in the file are
separate tensors afterwards.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import torch

from torch_xla import _bindings
from torch_xla._errors import message

_registered: list[torch.library.Library] = []


class _Bytes(torch.UntypedStorage):
    """Host memory on its way to an XLA device."""

    target: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """Where the tensor made from it shall be."""
        return self.target


def _check_format(do: str) -> None:
    """Refuses files that hold the values behind everything else: an xla tensor would copy them before they are read."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is torch.serialization._legacy_load.__code__:
            got = "got a file in the format of PyTorch before 1.6"
            raise RuntimeError(message("load", got, expected="a zip file", do=do))
        frame = frame.f_back


def _restore(storage: Any, location: str) -> Any:
    if location.partition(":")[0] != "xla":
        return None
    _check_format("load it with map_location='cpu' and move what it holds to xla")
    device = torch.device(location)
    count = _bindings.device_count()
    if location == "xla":
        device = torch.device("xla", _bindings.current_device())
    elif device.index >= count:
        expected = f"one of the {count} devices of this process"
        do = "give torch.load a map_location"
        raise RuntimeError(message("load", f"got a value for {location}", expected=expected, do=do))
    storage.target = device
    storage.__class__ = _Bytes
    return storage


def _set_storage(
    self: torch.Tensor, source: torch.UntypedStorage, offset: int, size: Sequence[int], stride: Sequence[int] = ()
) -> torch.Tensor:
    if not isinstance(source, _Bytes):
        got = "set_ needs a torch.Storage, and xla tensors have none"
        raise RuntimeError(message("storage", got, do="use tensors instead"))
    host = torch.empty(0, dtype=self.dtype, device="cpu").set_(source, offset, size, stride)
    return self.set_(host.to(self.device))  # type: ignore[call-overload]


def _forgetting_gradients(rebuild: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """PyTorch saves an xla tensor as a CPU tensor with its gradient flag, and then cannot set the flag of its copy."""

    # Pickles name the function, so it keeps the name: they stay readable without this package.
    @functools.wraps(rebuild)
    def wrapper(data: torch.Tensor, *args: Any) -> torch.Tensor:
        made = rebuild(data.detach(), *args)
        if made.device.type == "xla":
            _check_format("save it again with torch.save's default format")
        return made

    return wrapper


def install() -> None:
    """Registers ``xla`` as a place to load to; called once, at import."""
    # A priority of its own: PyTorch sorts the entries, and two functions cannot be compared.
    torch.serialization.register_package(49, lambda storage: None, _restore)
    library = torch.library.Library("aten", "IMPL")
    library.impl("set_.source_Storage_storage_offset", _set_storage, "XLA")
    _registered.append(library)
    # There is no registration for this one, and without it no tensor that asks for gradients can be unpickled.
    torch._utils._rebuild_device_tensor_from_cpu_tensor = _forgetting_gradients(
        torch._utils._rebuild_device_tensor_from_cpu_tensor
    )
