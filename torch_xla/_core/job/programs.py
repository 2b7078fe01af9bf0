"""Programs that span the devices of a job: nothing can be asked of them while they run, so their starts are counted.

XLA's collectives neither look whether the others run the same, nor say for whom they wait.
"""

from __future__ import annotations

import json

from torch_xla import _bindings
from torch_xla._core.device import client
from torch_xla._core.graph.graph import Graph
from torch_xla._core.job import sequence
from torch_xla._core.job.waits import Ranks, Wait, line

PLACE = "programs"
_TOLD = 16  # of the latest starts, by which a difference is named

_groups: dict[Ranks, int] = {}
_words: dict[int, tuple[str, str]] = {}
_failed: list[Wait] = []


def announce(program: _bindings.Program, graph: Graph, rank: int) -> None:
    """Has the starts of a program counted, where processes run it together by XLA's collectives.

    Args:
        program: The program.
        graph: What it computes.
        rank: This process.
    """
    world = len(client.devices_of_job())
    if not world or program.group >= 0:
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
    program.group = _groups.setdefault(ranks, len(_groups))
    program.meaning = sequence.number_of(identity)
    _words[program.meaning] = text, where


def under_way() -> Wait | None:
    """The oldest program with others that has not come to its end."""
    by_number = {number: ranks for ranks, number in _groups.items()}
    waits: list[Wait] = []
    for group, meaning, count, seconds, failed in _bindings.meetings():
        wait = Wait(
            by_number[group], _words[meaning][0], count, seconds, place=PLACE, started=_bindings.started(group)[0]
        )
        (_failed if failed else waits).append(wait)
    return waits[0] if waits else None


def take_failure() -> Wait | None:
    """A program with others that failed since the last call, if any."""
    under_way()
    found = _failed[0] if _failed else None
    _failed.clear()
    return found


def report() -> str:
    """What this process has started with others, for them to read."""
    found = []
    for ranks, number in list(_groups.items()):
        count, chain, meanings = _bindings.started(number)
        latest = meanings[-_TOLD:]
        found.append([ranks, count, chain[-1] if chain else 0, latest, {str(m): _words[m] for m in latest}])
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
        number = _groups.get(tuple(group))
        if number is None or other not in group:
            continue
        count, chain, meanings = _bindings.started(number)
        at = len(chain) - 1 - (count - theirs)
        if not 0 <= at < len(chain) or chain[at] == their_chain:
            continue  # too far apart to compare, or alike
        both = zip(reversed(meanings[: at + 1]), reversed(their_latest), strict=False)
        pair = next(((a, b) for a, b in reversed(list(both)) if a != b), None)
        if pair is None:
            return f"rank {other} and rank {rank} have not started the same programs, at {line()}"
        theirs_said, ours_said = sequence.said(words[str(pair[1])]), sequence.said(_words[pair[0]])
        return f"rank {other} runs {theirs_said}, rank {rank} runs {ours_said}"
    return None
