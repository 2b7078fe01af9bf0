"""PyTorch as it was when a call was recorded, for whoever lowers or computes the call later."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from torch_xla import _bindings


@contextmanager
def as_recorded(settings: int) -> Iterator[None]:
    """A scope with the settings that a node keeps, and without what is no business of kernels.

    The latter are autocast and modes over functions, such as one that gives a default device: they were there for the
    call that was recorded, and those of whoever asks for its value are others.

    Args:
        settings: What `_bindings.call_settings` gave then.
    """
    now = _bindings.call_settings()
    with torch._C.DisableTorchFunction(), torch._C._DisableAutocast():
        if now == settings:
            yield
            return
        _bindings.set_call_settings(settings)
        try:
            yield
        finally:
            _bindings.set_call_settings(now)
