"""Older names warn once per process."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

_told: set[str] = set()


def warn_once(old: str, new: str, stacklevel: int = 3) -> None:
    """Warns at the first use of an older name.

    Args:
        old: The older name.
        new: What to use instead.
        stacklevel: As of `warnings.warn`: 3 is the caller of the function that calls this one.
    """
    if old not in _told:
        _told.add(old)
        warnings.warn(f"[deprecated] {old} is an older name; use {new}", DeprecationWarning, stacklevel=stacklevel)


def deprecated(module: Any, new: Callable[..., Any], old_name: str | None = None) -> Callable[..., Any]:
    """An older name of a function, which warns at its first call.

    Args:
        module: The module with the older name, or that module's name.
        new: The function.
        old_name: The older name, if it is another one.
    """
    old = f"{getattr(module, '__name__', module)}.{old_name or new.__name__}"

    @functools.wraps(new)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        warn_once(old, f"{new.__module__}.{new.__name__}")
        return new(*args, **kwargs)

    return wrapper
