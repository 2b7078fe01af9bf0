"""Exception classes of the package and the one form its messages have."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class CompileError(RuntimeError):
    """XLA refused a graph, or a rule could not be lowered."""


class ExecutionError(RuntimeError):
    """A compiled graph failed while it ran."""


class OutOfMemoryError(torch.OutOfMemoryError):
    """A graph needs more memory than its device has, or than `XLA_MEMORY_LIMIT_MB` allows."""


class GraphLimitError(RuntimeError):
    """A region given to `torch_xla.compile` broke a promise: one graph only, or at most so many different ones."""


class LeftBehindError(RuntimeError):
    """An optimizer holds parameters that no longer belong to the module that moved to ``xla``."""


def message(area: str, got: str, *, expected: str | None = None, do: str | None = None) -> str:
    """Builds an error text: ``[area] got …, expected …; do …``.

    Args:
        area: Where it was noticed, for example ``"config"`` or ``"loader"``.
        got: What was found, as a clause.
        expected: What would have been right.
        do: The remedy, as an imperative.
    """
    text = f"[{area}] {got}"
    if expected:
        text += f", expected {expected}"
    if do:
        text += f"; {do}"
    return text


def listing(values: Iterable[object]) -> str:
    """The values as ``'a', 'b' or 'c'``."""
    names = [repr(value) for value in values]
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} or {names[-1]}"
