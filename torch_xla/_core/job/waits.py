"""What a process of a job waits for, and where it is."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from torch_xla import _bindings

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Wait:
    """What a process waits for.

    Attributes:
        ranks: The processes that have to come.
        what: For what, in words.
        count: Number of this meeting among those of these ranks.
        seconds: How long by now.
        limit: After how many seconds to give up; by default XLA_COLLECTIVE_TIMEOUT.
        place: Name of the meeting point; meetings are counted at each. "" is where collectives are.
        started: Number of the latest meeting there that this process has begun, where it may be ahead of the one that
            it waits for.
    """

    ranks: Ranks
    what: str
    count: int
    seconds: float = 0.0
    limit: float | None = None
    place: str = ""
    started: int = 0

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes it this wait, however long it takes."""
        return self.ranks, self.what, self.count, self.place


def line(thread: int | None = None) -> str:
    """The user's line at which a thread is, the main one by default."""
    return _bindings.thread_position(thread or threading.main_thread().ident or 0)[0] or "an unknown line"
