"""Eager mode: each operation is compiled and dispatched by itself, without a barrier."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch_xla import _bindings
from torch_xla._api import sync


def eager_mode(enable: bool) -> None:
    """Switches eager mode on or off, for the whole process.

    What is pending when it goes on is dispatched first. Functions given to `torch_xla.compile` are recorded as graphs
    in either mode.

    Args:
        enable: Whether operations shall run at once.
    """
    if enable and not _bindings.is_eager():
        sync()
    _bindings.set_eager(bool(enable))


def is_eager_mode() -> bool:
    """Whether operations run at once."""
    return _bindings.is_eager()


@contextmanager
def eager_mode_context(enable: bool) -> Iterator[bool]:
    """Switches eager mode for a block; yields what it was before."""
    saved = is_eager_mode()
    eager_mode(enable)
    try:
        yield saved
    finally:
        eager_mode(saved)
