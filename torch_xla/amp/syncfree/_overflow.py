"""What an optimizer is told of gradients that overflowed."""

from __future__ import annotations

import torch


def flag(optimizer: torch.optim.Optimizer, found_inf: torch.Tensor | None) -> torch.Tensor | None:
    """1 where the step is to be skipped, else 0, as float32; None where nobody looked.

    Args:
        optimizer: The optimizer; `torch.amp.GradScaler` sets ``found_inf`` and ``grad_scale`` on it.
        found_inf: What the caller of ``step`` found; any number but 0 skips.

    Raises:
        ValueError: It has dimensions.
    """
    found = getattr(optimizer, "found_inf", None) if found_inf is None else found_inf
    if found is None:
        return None
    if found.shape:
        raise ValueError("The found_inf tensor has to be scalar type")
    return (found != 0).to(torch.float32)
