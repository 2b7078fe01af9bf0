"""Collectives that were recorded and have not run.

The processes know a collective by its place in the order, so whatever runs one runs all that are pending, also those
whose results nobody has any more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_runners: list[Callable[[int, bool], None]] = []
_marks: list[torch.Tensor] = []
_recorded = 0


def add(mark: torch.Tensor) -> None:
    """Remembers a collective by a value that it gives when it has run; which keeps it in the graph."""
    global _recorded
    _recorded += 1
    _marks.append(mark)


def newest() -> int | None:
    """Number of the collective that was recorded last; None where none is pending."""
    return _recorded if _marks else None


def any_on(device: int) -> bool:
    """Whether there are some of a device."""
    return any(mark.device.index == device for mark in _marks)


def take(device: int) -> list[torch.Tensor]:
    """Takes a device's pending collectives off the list: they run now, or fail. Held, they stay in the graph."""
    marks = [mark for mark in _marks if mark.device.index == device]
    _marks[:] = [mark for mark in _marks if mark.device.index != device]
    return marks


def add_runner(run: Callable[[int, bool], None]) -> None:
    """Says how what is pending on a device is run; called once, at import."""
    _runners.append(run)


def run(wait: bool = False) -> None:
    """Starts the collectives that are pending: whoever is about to wait for other processes calls this.

    Another process may be blocked in one of them, and cannot come to the meeting before it has run here too. With
    `wait` they have run when this returns.
    """
    for device in sorted({mark.device.index for mark in _marks}):
        for runner in _runners:
            runner(device, wait)
