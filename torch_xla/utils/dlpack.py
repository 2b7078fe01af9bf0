"""Exchange of tensors with other libraries through DLPack.

Values are copied once, on the device: XLA may reuse a buffer it owns at any step, and must not write to one that it
does not own.
"""

from __future__ import annotations

from typing import Any

import torch

from torch_xla import _bindings
from torch_xla._core.device import client
from torch_xla._core.execute import barrier as _barrier
from torch_xla._errors import message


def to_dlpack(xla_tensor: torch.Tensor) -> Any:
    """A DLPack capsule with a copy of a tensor's values, on the hardware the tensor lives on.

    Args:
        xla_tensor: A tensor on an XLA device; it is computed first if it is pending.
    """
    if not isinstance(xla_tensor, torch.Tensor) or xla_tensor.device.type != "xla":
        where = xla_tensor.device if isinstance(xla_tensor, torch.Tensor) else type(xla_tensor).__name__
        raise ValueError(message("dlpack", f"got {where}", expected="a tensor on device xla"))
    dense = xla_tensor.detach().contiguous()
    with client.x64():
        return _barrier.buffers([dense], wait=True)[0].copy().__dlpack__()


def from_dlpack(ext_tensor: Any) -> torch.Tensor:
    """A tensor on the current XLA device with a copy of the values.

    Args:
        ext_tensor: A DLPack capsule, or an object with ``__dlpack__``, on the CPU or on the XLA device's hardware.
    """
    if hasattr(ext_tensor, "__dlpack__"):
        kind, _ = ext_tensor.__dlpack_device__()
        if int(kind) != int(torch.utils.dlpack.DLDeviceType.kDLCPU):
            import jax

            from torch_xla.ops import dtypes

            index = _bindings.current_device()
            with client.x64():
                array = jax.device_put(jax.dlpack.from_dlpack(ext_tensor).copy(), client.jax_device(index))
            return _bindings.tensor_of(array, list(array.shape), dtypes.torch_dtype(array.dtype), index)
    return torch.utils.dlpack.from_dlpack(ext_tensor).to("xla")
