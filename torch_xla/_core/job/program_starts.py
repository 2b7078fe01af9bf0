"""Counts and hashes the starts of programs that span a job's devices, for processes to compare.

A running program cannot be asked anything, and XLA's collectives neither check that the other processes run the same
program nor say which process they wait for.
"""

from __future__ import annotations

import functools
import json
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch_xla import _bindings
from torch_xla._core.device import client, environment, transfer
from torch_xla._core.graph import sequence
from torch_xla._core.graph.graph import Graph
from torch_xla._core.job.waits import Ranks, Wait, line

PLACE = "programs"
_TOLD = 16  # of the latest starts, by which a difference is named
_REMEMBERED = 4096  # of a group's starts
_UNDER_WAY = 64  # what was started before so many others is long past
_STEP, _CHAINS = 6364136223846793005, 1 << 64
_STEP_BACK = pow(_STEP, -1, _CHAINS)


class _Link(NamedTuple):
    """A start of a program by a group. `chain` hashes all starts up to this one: processes compare one number."""

    number: int
    chain: int
    meaning: int
    text: str  # what was started, in words
    where: str  # and where from


@dataclass(eq=False)
class _Start:
    wait: Wait
    split: list[int]  # the results with parts in several processes, the last where none has; found by the first start
    token: Any = None  # none while it is being started
    failed: bool = False

    def met(self, results: Any) -> None:
        """Takes its results, of which the last tells when it has run; None where it could not be started."""
        if results is None:
            self.failed = True
            return
        if not self.split:
            self.split[:] = [i for i, array in enumerate(results) if not transfer.is_readable(array)] or [-1]
        for slot in self.split:
            results[slot].origin = f"result {slot} of program {self.wait.count}"
        self.token = results[-1]

    def is_over(self) -> bool:
        if self.failed or self.token is None or not self.token.is_ready():
            return self.failed
        try:
            self.token.block_until_ready()  # does not block any more; raises what it failed with
        except Exception:
            self.failed = True
        return True


_groups: dict[Ranks, deque[_Link]] = {}
_under_way: deque[_Start] = deque(maxlen=_UNDER_WAY)
_failed: list[Wait] = []
_lock = threading.Lock()


def announce(program: _bindings.Program, graph: Graph) -> None:
    """Counts the starts of a program that processes run together by XLA's collectives."""
    world = len(client.devices_of_job())
    if not world:
        return
    if client.spmd():
        everyone = tuple(sorted({device.process_index for device in client.devices_of_job()}))
        if len(everyone) > 1:
            program.on_start = _counting(everyone, f"program {graph.key} over all devices")
        return
    numbers = sequence.numbers(graph, environment.rank_info().rank)
    flat_numbers = [number for group_numbers in numbers.values() for number in group_numbers]
    if flat_numbers:
        ranks = tuple(sorted({member for group in numbers for member in group}))
        text, where = sequence.meaning(flat_numbers[0])
        more = f" and {len(flat_numbers) - 1} more" if len(flat_numbers) > 1 else ""
        program.on_start = _counting(ranks, f"{text}{more}", str(sorted(numbers.items())), where)


def _counting(ranks: Ranks, text: str, identity: str | None = None, where: str | None = None) -> Any:
    """Makes the function that counts a program's starts by these processes; its text is its `identity` by default."""
    return functools.partial(_meet, ranks, sequence.number_of(identity or text), text, where, [])


def start(ranks: Ranks, text: str) -> Callable[[Any], None]:
    """Counts the start, by these processes, of a program that is not the recorder's; returns who takes its results.

    The returned function is to be called with the results. `text` describes the program, the same in all processes.
    """
    return _counting(ranks, text)()


def so_far(ranks: Ranks) -> tuple[int, int]:
    """How many programs these processes have started, and a number that stands for all of them."""
    links = _groups.get(ranks)
    return links[-1][:2] if links else (0, 0)


def counts() -> dict[Ranks, int]:
    """How many programs this process has started with others, by who they are."""
    return {ranks: links[-1].number for ranks, links in list(_groups.items()) if links}


def _meet(ranks: Ranks, meaning: int, text: str, where: str | None, split: list[int]) -> Callable[[Any], None]:
    """Notes a start; gives what takes its results."""
    where = where or f"run at {_bindings.user_frame() or 'an unknown line'}"
    with _lock:
        number, chain = so_far(ranks)
        # The step of a linear congruential generator: each start has its place in the order.
        link = _Link(number + 1, (chain * _STEP + meaning) % _CHAINS, meaning, text, where)
        _groups.setdefault(ranks, deque(maxlen=_REMEMBERED)).append(link)
    started = _Start(Wait(ranks, text, link.number, PLACE), split)
    _under_way.append(started)
    return started.met


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
    return replace(first.wait, started=latest)


def take_failure() -> Wait | None:
    """A program with others that failed since the last call, if any."""
    under_way()
    failure = _failed[0] if _failed else None
    _failed.clear()
    return failure


def report() -> str:
    """A report of the programs that this process has started with others, for them to read."""
    entries = []
    for ranks, links in list(_groups.items()):
        latest = [links[i] for i in range(-min(_TOLD, len(links)), 0)]
        count, chain = so_far(ranks)
        entries.append([ranks, count, chain, [(link.meaning, link.text, link.where) for link in latest]])
    return json.dumps(entries)


def started_by(told: str | None, ranks: Ranks) -> int:
    """How many programs of these processes one has started, by its report."""
    return next((int(count) for group, count, *_ in json.loads(told or "[]") if tuple(group) == ranks), 0)


def first_of_groups(rank: int) -> list[int]:
    """With whom this process compares what it has started: the first of each of its groups."""
    return sorted({ranks[0] for ranks in list(_groups)} - {rank})


def difference(told: str | None, other: int, rank: int) -> str | None:
    """The first program in which this process and another, by its report, differ, in words; None if none is known."""
    for group, theirs, their_chain, latest in json.loads(told or "[]"):
        links = list(_groups.get(tuple(group), ()))
        if not links or other not in group:
            continue
        while theirs > links[-1].number and latest:  # back to where this process is
            their_chain = (their_chain - latest.pop()[0]) * _STEP_BACK % _CHAINS
            theirs -= 1
        at = len(links) - 1 - (links[-1].number - theirs)
        if not 0 <= at < len(links) or links[at].chain == their_chain:
            continue  # too far apart to compare, or alike
        both = zip(reversed(links[: at + 1]), reversed(latest), strict=False)
        pair = next(((link, their) for link, their in reversed(list(both)) if link.meaning != their[0]), None)
        if pair is None:
            return f"[job] rank {other} and rank {rank} have not started the same programs, at {line()}"
        link, (_, *their_entry) = pair
        return sequence.difference((rank, (link.text, link.where)), (other, their_entry))
    return None
