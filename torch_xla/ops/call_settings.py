"""PyTorch as it was when a call was recorded, for whoever lowers or computes the call later.

PyTorch's own default dtype stays as it is: it is the process's, and other threads make tensors meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from torch_xla import _bindings, _config
from torch_xla._torch_internals import no_autocast, no_torch_function

_recorded: ContextVar[int | None] = ContextVar("settings of a recorded call", default=None)


def current() -> int:
    """The settings of the call that this thread lowers or computes; PyTorch's where there is none."""
    settings = _recorded.get()
    return _bindings.call_settings() if settings is None else settings


def default_dtype() -> torch.dtype:
    """The default dtype among them."""
    return _bindings.default_dtype(current())


@contextmanager
def as_recorded(settings: int) -> Iterator[None]:
    """A scope with the settings that `_bindings.call_settings` gave at a call, without what is no business of kernels.

    The latter are autocast and modes over functions, such as one that gives a default device: they were there for the
    call that was recorded, and those of whoever asks for its value are others.
    """
    with no_torch_function(), no_autocast(), _config.within(_recorded, settings):
        yield
