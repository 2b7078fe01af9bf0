"""What a process of a job waits for, and where it is."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from torch_xla import _bindings

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Wait:
    """What a process waits for."""

    ranks: Ranks  # the processes that have to come
    what: str  # for what, in words
    count: int  # number of this meeting among those of these ranks
    seconds: float = 0.0  # how long by now
    limit: float | None = None  # after how many seconds to give up; by default XLA_COLLECTIVE_TIMEOUT
    place: str = ""  # meetings are counted at each meeting point; "" is where collectives are
    started: int = 0  # the latest meeting there that this process has begun, which may be ahead of the one it waits for

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes it this wait, however long it takes."""
        return self.ranks, self.what, self.count, self.place


def line(thread: int | None = None) -> str:
    """The user's line at which a thread is, the main one by default."""
    return _bindings.thread_position(thread or threading.main_thread().ident or 0)[0] or "an unknown line"
