"""Holds the one `connection.Connection` of this process, made where it is first needed."""

from __future__ import annotations

import atexit
import faulthandler
import functools
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from torch_xla import _bindings
from torch_xla._core.device import client, described, environment, failures
from torch_xla._core.job import failed_collective, orphans, pending_collectives, watch
from torch_xla._core.job.connection import Connection
from torch_xla._core.job.imagined import ImaginedConnection
from torch_xla._core.job.store import own_address
from torch_xla._core.job.waits import Ranks

_WATCH_ENDS = 5.0  # seconds


def exchange_ints(number: int, ranks: Sequence[int], what: str) -> list[int]:
    """Exchanges an integer between these processes, for what `what` says; returns all, in the order of `ranks`."""
    job = connection()
    if job is None:
        return [number]
    return [int(text) for text in job.meet("numbers", as_ranks(ranks), what, str(number).encode())]


def wait_for_all(ranks: Sequence[int], what: str) -> None:
    """Waits until all of these processes have called this."""
    exchange_ints(0, ranks, what)


_connection: Connection | None = None
_lock = threading.RLock()


def rank_info() -> environment.RankInfo:
    """The place of this process in its job; connects nothing."""
    return _connection.rank_info if _connection is not None else environment.rank_info()


def own_file(path: str) -> str:
    """The file of this process, where a setting names one for all of them: with its rank, in a job of several."""
    info = rank_info()
    return path if info.world == 1 else f"{path}.{info.rank}"


def connection() -> Connection | None:
    """The connection to the other processes, made at the first call; None for a process alone.

    Raises JobError where the others cannot be reached.
    """
    global _connection
    if _connection is not None:
        return _connection
    with _lock:
        if _connection is None:
            info = environment.rank_info()
            if info.world == 1:
                return None
            if described.topology() is not None:
                _connection = ImaginedConnection(info)
                _connection.join()
                return _connection
            _show_where_ended(info.rank)
            if "TORCHELASTIC_RUN_ID" in os.environ:  # by torchrun
                orphans.follow_launcher(end_orphan)
            job = Connection(info)
            watching = watch.start(job)
            failures.add_explanation(functools.partial(failed_collective.explain, job))
            atexit.register(_leave_at_exit, watching)
            try:
                job.join()
            except BaseException as error:
                job.stop(str(error))  # it is not tried again: the others have been told
                raise
            finally:
                _connection = job
        return _connection


def end_orphan() -> None:
    """Stops the job in this process, whose launcher has ended, and ends it."""
    if _connection is not None and _connection.is_own():
        orphans.end(str(_connection.lost()), _connection.over)
    orphans.end(f"[job] rank {rank_info().rank} ends, as whoever started it has ended", threading.Event())


def _show_where_ended(rank: int) -> None:
    """Makes this process tell of it, and where it was, when its launcher ends it."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and sys.__stderr__ is not None:
        with suppress(OSError, ValueError):  # it has no file
            faulthandler.register(signal.SIGTERM, sys.__stderr__, all_threads=False, chain=True)
            _bindings.tell_at_sigterm(f"[job] rank {rank} was sent SIGTERM, as its job has failed; it was here:\n")
            os.register_at_fork(after_in_child=_end_silently)


def _end_silently() -> None:
    """Undoes that in a child, such as a worker of a pool, which is ended when there is no more work."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # a handler of the program stands in its place
        faulthandler.unregister(signal.SIGTERM)


def _meeting_of_clients() -> client.Meeting | None:
    """The address where the clients of all processes meet: at rank 0."""
    job = connection()
    if job is None:
        return None
    endpoint = b""
    if job.rank_info.rank == 0:
        address = own_address(job.rank_info)
        with socket.create_server((address, 0)) as free:
            endpoint = f"{address}:{free.getsockname()[1]}".encode()
    endpoints = job.meet("devices", job.everyone, "the first use of the devices", endpoint)
    return endpoints[0].decode(), job.rank_info.world, job.rank_info.rank


client.set_meeting(_meeting_of_clients)


def connected() -> Connection | None:
    """The connection, if it was made."""
    return _connection


def finish() -> None:
    """Computes what others may still wait for, at the end of a program that did not fail."""
    if _connection is not None and _connection.stopped is None:
        pending_collectives.run(wait=True)
        # Programs that were started may be in a collective, in which nobody is pending any more.
        for device in range(_bindings.device_count() if client.client_started() else 0):
            _bindings.in_flight(device).wait_for_programs()


def leave(failure: BaseException | None = None) -> None:
    """Tells the others, if there are some, that this process has ended, and why if it failed."""
    if _connection is not None:
        _connection.leave(failure)


def _leave_at_exit(watching: threading.Thread) -> None:
    if _connection is None or not _connection.is_own():
        return
    failure = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    try:
        if failure is None:
            finish()
    finally:
        _connection.leave(failure)
        watching.join(_WATCH_ENDS)  # it must not come back from the store to an interpreter that is taken down


def as_ranks(ranks: Sequence[int]) -> Ranks:
    """A list of ranks as this module takes it."""
    return tuple(int(rank) for rank in ranks)
