"""Buffers that a tensor gives away: a program that has one as an input may write over it, and the tensor is lost."""

from __future__ import annotations

import torch

from torch_xla import _bindings, _metrics

_everywhere = False


def give(tensor: torch.Tensor, should_donate: bool = True) -> bool:
    """Gives a tensor's buffer to the next barrier whose program has it as an input, or takes that back.

    Says whether it had a buffer; it has none while it is pending, if it is a view, or if it is lost.
    """
    has_buffer = _bindings.set_buffer_donor(tensor, should_donate)
    if has_buffer:
        _metrics.count("XlaSetBufferDonation")
    return has_buffer


def is_given(tensor: torch.Tensor) -> bool:
    """Whether `give` was called for the buffer."""
    return _bindings.is_buffer_donor(tensor)


def without_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values: its buffer was written over, or it is a placeholder."""
    return _bindings.is_lost(tensor) or _bindings.is_placeholder(tensor)


def set_everywhere(on: bool) -> None:
    """Whether programs for some tensors alone may have given buffers too, not only those of barriers."""
    global _everywhere
    _everywhere = on


def everywhere() -> bool:
    """Whether `set_everywhere` is on."""
    return _everywhere
