"""Explains a failure of a collective by what the other processes report."""

from __future__ import annotations

import json
import threading

from torch_xla import _bindings
from torch_xla._core.graph import sequence
from torch_xla._core.job import program_starts
from torch_xla._core.job.connection import Connection
from torch_xla._core.job.waits import line, soon


def explain(connection: Connection, error: str) -> str | None:
    """Explains a failure, and stops the job; None if the error is not a collective's."""
    failed = program_starts.take_failure()
    if failed is None and "[collective]" not in error and "[job]" not in error:
        return None
    if connection.stopped is not None:
        return connection.stopped
    text = (error if failed is not None else error[error.index("[") :]).splitlines()[0]
    within, differing = _bindings.take_collective_failure() or (None, [])
    try:
        if differing:
            text = _difference(connection, *differing)
        else:
            operation = within or (failed.what if failed is not None else "a collective")
            position = f"rank {connection.rank_info.rank} was in {operation}, at {line(threading.get_ident())}"
            text = soon(lambda: _who_left(connection, position)) or f"[job] {position}, which failed: {text}"
    except RuntimeError as lost:
        connection.lost(lost)
    connection.break_off(text)
    return connection.stopped


def _who_left(connection: Connection, position: str) -> str | None:
    own_rank = connection.rank_info.rank
    if (reason := connection.read("broken")) is not None:
        return reason
    for rank in connection.everyone:
        if rank != own_rank and (end := connection.end_of(rank)) is not None:
            difference = program_starts.difference(connection.read(f"ran/{rank}"), rank, own_rank)
            return difference or f"{end} while {position}"
    return None


def _difference(connection: Connection, own: int, other: int, theirs: int) -> str:
    """The different collectives that two processes are about to run, in words."""
    meaning = sequence.meaning(own)
    connection.store.set(f"about/{own}", json.dumps(meaning))
    answer = soon(lambda: connection.read(f"about/{theirs}"))
    their_meaning = sequence.meaning(theirs) if answer is None else json.loads(answer)
    return sequence.difference((connection.rank_info.rank, meaning), (other, their_meaning))
