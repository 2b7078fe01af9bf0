"""Exception classes of the package and the one form its messages have."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class ExecutionError(RuntimeError):
    """A graph failed after it was started, which whoever waits next finds out."""


class JobError(RuntimeError):
    """The processes of a job do not do the same, or one of them is gone.

    What a library said of it is not shown before the reason: it names sockets and numbers of its own.
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.__suppress_context__ = True


class LateJobError(JobError, ExecutionError):
    """A `JobError` that is found after a graph was started."""


class OutOfMemoryError(torch.OutOfMemoryError):
    """A graph needs more memory than its device has, or than `XLA_MEMORY_LIMIT_MB` allows."""


class LateOutOfMemoryError(OutOfMemoryError, ExecutionError):
    """Memory ran out after a graph was started."""


class GraphFailure(Exception):
    """A graph failed before its results were attached: `failures.recover` says what is told of it, and what remains.

    Attributes:
        cause: What was raised.
        nodes: Positions of the graph's nodes that cannot run. With no unfilled leaf either it is unknown which.
        final: Whether the cause is told as it is: PyTorch's own exception.
    """

    def __init__(self, cause: Exception, nodes: tuple[int, ...] = (), final: bool = False) -> None:
        super().__init__(cause)
        self.cause, self.nodes, self.final = cause, nodes, final


class GraphLimitError(RuntimeError):
    """A region given to `torch_xla.compile` broke its limit: one graph only, or at most so many different ones."""


class OptionsError(RuntimeError):
    """The device's compiler failed with options of the user's; the graph stays pending, to be compiled with others."""


def message(area: str, got: str, *, expected: str | None = None, do: str | None = None) -> str:
    """Builds an error text: ``[area] got …, expected …; do …``.

    The area is where it was noticed, such as ``"config"``; `got` is a clause of what was found, `expected` what would
    have been right, `do` the remedy, an imperative.
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


def one_line(error: BaseException) -> str:
    """An error's text in one line; its type if it has none."""
    return " ".join(str(error).split()) or type(error).__name__


def raise_first(failures: list[Exception]) -> None:
    """Raises the first of some failures, if there are any; it has the others as notes. Leaves the list empty.

    A list that stayed in the variables of whoever raises its errors would be held by them, and hold the variables of
    all callers: their tensors would live until Python looks for cycles.
    """
    try:
        for other in dict.fromkeys(map(str, failures)):
            if other != str(failures[0]):
                failures[0].add_note(f"another failure at the same time: {other}")
        if failures:
            raise failures[0]
    finally:
        failures.clear()
