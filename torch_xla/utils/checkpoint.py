"""Activation checkpointing under its older name; on xla `torch.utils.checkpoint` itself does the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint as _checkpoint
from torch.utils.checkpoint import CheckpointFunction as CheckpointFunction


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = True, **kwargs: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint`, reentrant by default.

    Args:
        function: Computes a part of the model; it runs again during the backward pass.
        *args: Its arguments.
        use_reentrant: Which of PyTorch's two implementations runs it.
        **kwargs: ``preserve_rng_state``, and what else PyTorch's function takes.

    Returns:
        What the function returns.
    """
    return _checkpoint.checkpoint(function, *args, use_reentrant=use_reentrant, **kwargs)
