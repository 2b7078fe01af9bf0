"""AdamW that skips a step on the device."""

from __future__ import annotations

import torch

from torch_xla.amp.syncfree.adam import Adam


class AdamW(Adam, torch.optim.AdamW):
    """`torch.optim.AdamW` whose step is skipped on the device when gradients are not finite.

    All arguments are those of `torch.optim.AdamW`.
    """
