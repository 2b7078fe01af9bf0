"""Has the options that the user gives the device's compiler, for the process or for a region; imports no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar

from torch_xla import _config
from torch_xla._errors import message

Options = tuple[tuple[str, str | int | float], ...]  # of the device's compiler, in the user's order

_process_options: Options = ()
_region_options: ContextVar[Options | None] = ContextVar("options of a region's compiler", default=None)


def custom() -> Options:
    """What the user asks of the device's compiler: in a region that has options these, else the process's."""
    own = _region_options.get()
    return _process_options if own is None else own


def set_custom(options: Mapping[str, str | int | float]) -> None:
    """Sets the process's; TypeError where they are not text, numbers and booleans by name."""
    global _process_options
    _process_options = checked(options)


def within(options: Options) -> AbstractContextManager[None]:
    """A scope, in this thread, with other options."""
    return _config.within(_region_options, options)


def checked(options: Mapping[str, str | int | float]) -> Options:
    """A user's options as they are kept; TypeError as `set_custom`."""
    if not isinstance(options, Mapping) or not all(
        isinstance(name, str) and isinstance(value, (str, int, float)) for name, value in options.items()
    ):
        raise TypeError(
            message("compile", f"got options {options!r}", expected="a dict of text, numbers and booleans by name")
        )
    return tuple(options.items())
