"""``torch_xla.amp.autocast``: `torch.autocast` for an XLA device."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from torch_xla._core.device import client
from torch_xla._errors import message


class autocast(torch.amp.autocast_mode.autocast):
    """``torch.autocast("xla")`` under its older name.

    Args:
        device: An XLA device.
        enabled: Whether to cast.
        dtype: Type of matrix products and convolutions, `torch.bfloat16` or `torch.float16`; `torch.bfloat16` by
            default. A TPU computes in no other half type: there, any other one warns and casts nothing.
        cache_enabled: Whether casts of a parameter are kept within the block.

    Raises:
        ValueError: The device is not an XLA device.
    """

    def __init__(
        self, device: Any, enabled: bool = True, dtype: torch.dtype | None = None, cache_enabled: bool = True
    ) -> None:
        if torch.device(device).type != "xla":
            raise ValueError(message("amp", f"got device {device}", expected="an xla device"))
        if dtype is None:
            dtype = torch.bfloat16
        if enabled and dtype != torch.bfloat16 and client.device_type() == "TPU":
            warnings.warn(
                message("amp", f"got dtype={dtype} on TPU: nothing is cast", expected="torch.bfloat16"), stacklevel=2
            )
            enabled = False
        super().__init__("xla", dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)
