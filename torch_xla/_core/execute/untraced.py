"""Keeps modes and tracing of the user's program out of this package's own work.

A barrier, a read or an upload inside a function under ``torch.compile``, or in a backward pass that such a function
starts, would otherwise have its Python frames, and JAX's, traced and compiled too; and a mode over PyTorch's functions,
such as one that gives a default device, would see the calls that are made here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch_xla._torch_internals import SKIP_FRAME, no_torch_function, set_code_strategy

P = ParamSpec("P")
R = TypeVar("R")


def skip(function: Callable[..., object], around: Callable[..., object]) -> None:
    """Makes PyTorch's compiler skip functions and all that they call."""
    for target in (function, around):
        set_code_strategy(target.__code__, SKIP_FRAME)
    around._torchdynamo_disable = True  # type: ignore[attr-defined]  # where it would inline it


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Makes a function run as it is, with all that it calls."""

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> R:
        with no_torch_function():
            return function(*args, **kwargs)

    skip(function, alone)
    return alone
