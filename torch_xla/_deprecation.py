"""Older names warn once per process."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

from torch_xla import _notices


def warn_once(old: str, new: str, stacklevel: int = 3, extra_msg: str | None = None) -> None:
    """Warns at the first use of an older name; a stack level of 3 is the caller of the function that calls this one."""
    if _notices.is_new("deprecated", old):
        text = f"[deprecated] {old} is an older name; use {new}" + (f". {extra_msg}" if extra_msg else "")
        warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)


def deprecated(
    module: Any, new: Callable[..., Any], old_name: str | None = None, extra_msg: str | None = None
) -> Callable[..., Any]:
    """An older name of a function in a module, or one of that name, which warns at its first call."""
    old = f"{getattr(module, '__name__', module)}.{old_name or new.__name__}"

    @functools.wraps(new)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        warn_once(old, f"{new.__module__}.{new.__name__}", extra_msg=extra_msg)
        return new(*args, **kwargs)

    return wrapper


def mark_deprecated(
    new: Callable[..., Any], extra_msg: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates a function that is replaced by another one: its calls warn once and go there."""
    return lambda old: deprecated(old.__module__, new, old.__name__, extra_msg)
