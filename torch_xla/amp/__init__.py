"""Mixed precision: PyTorch's own autocast and gradient scaler, set up for ``xla``."""

from __future__ import annotations

from typing import Any

import torch

from torch_xla._errors import message


class autocast(torch.amp.autocast):
    """``torch.autocast("xla")`` under its older name.

    Args:
        device: An XLA device.
        enabled: Whether to cast.
        dtype: Type of matrix products and convolutions; `torch.bfloat16` by default.
        cache_enabled: Whether casts of a parameter are kept within the block.
    """

    def __init__(
        self, device: Any, enabled: bool = True, dtype: torch.dtype | None = None, cache_enabled: bool = True
    ) -> None:
        if torch.device(device).type != "xla":
            raise ValueError(message("amp", f"got device {device}", expected="an xla device"))
        super().__init__("xla", dtype=dtype or torch.bfloat16, enabled=enabled, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` on ``xla``; takes its other arguments."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__("xla", **kwargs)
