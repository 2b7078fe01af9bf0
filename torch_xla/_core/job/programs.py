"""Programs that span the devices of a job: nothing can be asked of them while they run, so their starts are counted.

XLA's collectives neither look whether the others run the same, nor say for whom they wait.
"""

from __future__ import annotations

import functools
import json
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch_xla import _bindings
from torch_xla._core.device import client
from torch_xla._core.graph import sequence
from torch_xla._core.graph.graph import Graph
from torch_xla._core.job.waits import Ranks, Wait, line

PLACE = "programs"
_TOLD = 16  # of the latest starts, by which a difference is named
_REMEMBERED = 4096  # of a group's starts
_UNDER_WAY = 64  # what was started before so many others is long past


class _Link(NamedTuple):
    """One of a group's starts. Its `chain` stands for all until then, so that two processes need compare one."""

    number: int
    chain: int
    meaning: int


@dataclass(eq=False)
class _Start:
    wait: Wait
    since: float
    token: Any = None  # none while it is being started
    failed: bool = False

    def met(self, token: Any) -> None:
        """Takes what tells when it has run; None where it could not be started."""
        self.token, self.failed = token, token is None

    def is_over(self) -> bool:
        if self.failed or self.token is None or not self.token.is_ready():
            return self.failed
        try:
            self.token.block_until_ready()  # does not block any more; raises what it failed with
        except Exception:
            self.failed = True
        return True


_groups: dict[Ranks, deque[_Link]] = {}
_words: dict[int, tuple[str, str]] = {}
_under_way: deque[_Start] = deque(maxlen=_UNDER_WAY)
_failed: list[Wait] = []
_lock = threading.Lock()


def announce(program: _bindings.Program, graph: Graph, rank: int) -> None:
    """Has the starts of a program counted, where processes run it together by XLA's collectives.

    Args:
        program: The program.
        graph: What it computes.
        rank: This process.
    """
    world = len(client.devices_of_job())
    if not world:
        return
    if client.spmd():
        everyone = tuple(sorted({device.process_index for device in client.devices_of_job()}))
        if len(everyone) > 1:
            text = f"program {graph.key} over all devices"
            _set(program, everyone, text, text, "an unknown line")
        return
    numbers = sequence.numbers(graph, rank)
    own = [number for found in numbers.values() for number in found]
    if own:
        ranks = tuple(sorted({member for group in numbers for member in group}))
        text, where = sequence.meaning(own[0])
        more = f" and {len(own) - 1} more" if len(own) > 1 else ""
        _set(program, ranks, str(sorted(numbers.items())), f"{text}{more}", where)


def _set(program: _bindings.Program, ranks: Ranks, identity: str, text: str, where: str) -> None:
    meaning = sequence.number_of(identity)
    _groups.setdefault(ranks, deque(maxlen=_REMEMBERED))
    _words[meaning] = text, where
    program.meet = functools.partial(_meet, ranks, meaning)


def _meet(ranks: Ranks, meaning: int) -> Callable[[Any], None]:
    """Notes a start; gives what takes its token."""
    with _lock:
        links = _groups[ranks]
        before = links[-1] if links else _Link(0, 0, 0)
        # The step of a linear congruential generator: each start has its place in the order.
        chain = (before.chain * 6364136223846793005 + meaning) % (1 << 64)
        links.append(_Link(before.number + 1, chain, meaning))
    start = _Start(Wait(ranks, _words[meaning][0], before.number + 1, place=PLACE), time.monotonic())
    _under_way.append(start)
    return start.met


def under_way() -> Wait | None:
    """The oldest program with others that has not come to its end."""
    first: _Start | None = None
    for start in list(_under_way):
        if not start.is_over():
            first = first or start
            continue
        with suppress(ValueError):  # another thread took it out
            _under_way.remove(start)
            if start.failed:
                _failed.append(start.wait)
    if first is None:
        return None
    latest = _groups[first.wait.ranks][-1].number
    return replace(first.wait, seconds=time.monotonic() - first.since, started=latest)


def take_failure() -> Wait | None:
    """A program with others that failed since the last call, if any."""
    under_way()
    found = _failed[0] if _failed else None
    _failed.clear()
    return found


def report() -> str:
    """What this process has started with others, for them to read."""
    found = []
    for ranks, links in list(_groups.items()):
        latest = [link.meaning for link in list(links)[-_TOLD:]]
        count, chain, _ = links[-1] if links else _Link(0, 0, 0)
        found.append([ranks, count, chain, latest, {str(m): _words[m] for m in latest}])
    return json.dumps(found)


def started_by(told: str, ranks: Ranks) -> int:
    """How many programs of these processes one has started.

    Args:
        told: Its report.
        ranks: The processes.
    """
    return next((int(count) for group, count, *_ in json.loads(told or "[]") if tuple(group) == ranks), 0)


def first_of_groups(rank: int) -> list[int]:
    """With whom this process compares what it has started: the first of each of its groups."""
    return sorted({ranks[0] for ranks in list(_groups)} - {rank})


def difference(told: str, other: int, rank: int) -> str | None:
    """In what this process and another differ, where they have not started the same.

    Args:
        told: The other's report.
        other: Its rank.
        rank: This process.
    """
    for group, theirs, their_chain, their_latest, words in json.loads(told or "[]"):
        links = list(_groups.get(tuple(group), ()))
        if not links or other not in group:
            continue
        at = len(links) - 1 - (links[-1].number - theirs)
        if not 0 <= at < len(links) or links[at].chain == their_chain:
            continue  # too far apart to compare, or alike
        both = zip((link.meaning for link in reversed(links[: at + 1])), reversed(their_latest), strict=False)
        pair = next(((a, b) for a, b in reversed(list(both)) if a != b), None)
        if pair is None:
            return f"rank {other} and rank {rank} have not started the same programs, at {line()}"
        theirs_said, ours_said = sequence.said(words[str(pair[1])]), sequence.said(_words[pair[0]])
        return f"rank {other} runs {theirs_said}, rank {rank} runs {ours_said}"
    return None
