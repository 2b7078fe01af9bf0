"""Describes what a process of a job waits for, and where it is."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from torch_xla import _bindings

T = TypeVar("T")
Ranks = tuple[int, ...]
_ANSWERS_WITHIN = 3.0  # seconds


@dataclass(frozen=True)
class Wait:
    """A wait of a process."""

    ranks: Ranks  # the processes that have to come
    what: str  # for what, in words
    count: int  # number of this meeting among those of these ranks
    place: str = ""  # meetings are counted at each meeting point; "" is where collectives are
    started: int = 0  # the latest meeting there that this process has begun, which may be ahead of the one it waits for
    since: float = field(default_factory=time.monotonic, compare=False)
    # After how many seconds to give up; by default XLA_COLLECTIVE_TIMEOUT.
    limit: float | None = field(default=None, compare=False)

    @property
    def seconds(self) -> float:
        """How long by now."""
        return time.monotonic() - self.since

    def text(self) -> str:
        """The text of it that the other processes read."""
        return json.dumps([self.ranks, self.what, self.count, self.place, self.started])

    def has_come(self, other: Wait | None) -> bool:
        """Whether a process is at this meeting, or was, by what it waits for."""
        same = other is not None and (other.ranks, other.place) == (self.ranks, self.place)
        return same and other is not None and max(other.count, other.started) >= self.count


def parse(text: str | None) -> Wait | None:
    """Parses the result of `Wait.text`; None if it is empty."""
    if not text:
        return None
    ranks, *others = json.loads(text)
    return Wait(tuple(ranks), *others)


def until(look: Callable[[], T | None], pause: float, most: float = 0.0, seconds: float = math.inf) -> T | None:
    """Looks until there is something, and gives that, or None after so many seconds.

    The pauses between two looks grow from one to another length, if that is longer.
    """
    deadline = time.monotonic() + seconds
    while (answer := look()) is None and time.monotonic() < deadline:
        time.sleep(pause)
        pause = max(pause, min(1.5 * pause, most))
    return answer


def soon(look: Callable[[], T | None]) -> T | None:
    """A value of the store that others are about to write; None if it is not there in time."""
    return until(look, 0.02, seconds=_ANSWERS_WITHIN)


def line(thread: int | None = None) -> str:
    """The user's line at which a thread is, the main one by default."""
    return _bindings.thread_position(thread or threading.main_thread().ident or 0)[0] or "an unknown line"
