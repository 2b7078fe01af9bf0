"""The watch: a thread of each process that finds out why a wait cannot end, and ends it with the reason.

It sees processes that are gone, that wait for each other, that run another program, or that are late.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from contextlib import suppress

from torch_xla import _config, _notices
from torch_xla._core.device import background, client
from torch_xla._core.job import orphans, pending_collectives, program_starts
from torch_xla._core.job.connection import Connection
from torch_xla._core.job.waits import Ranks, Wait, line, parse, soon
from torch_xla._errors import JobError

_TICK = 0.25  # seconds
_ASKED_TICK, _ASKED_FOR = 0.01, 5.0  # seconds after a request, because a reader waits for the answer
_PUBLISHED_AFTER = 1.0  # seconds of a wait
_COMPARED_EVERY = 1.0  # seconds
_LEAVES_WITHIN = 5.0  # seconds from the end of the job to that of a process that is stuck in a program with others


def start(connection: Connection) -> threading.Thread:
    """Starts the watch of this process, which ends soon after the process has left the job."""
    thread = threading.Thread(target=_Watch(connection).run, name="torch_xla-job", daemon=True)
    thread.start()
    return thread


class _Watch:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._store = connection.store
        self._rank = connection.rank_info.rank
        self._news = 0
        self._suspected: object = None
        self._pending: tuple[int | None, float] = (None, 0.0)
        self._compared = time.monotonic()
        self._asked = 0.0

    def run(self) -> None:
        while self._connection.stopped is None and not self._connection.over.wait(
            _ASKED_TICK if time.monotonic() - self._asked < _ASKED_FOR else _TICK
        ):
            try:
                self._look()
            except RuntimeError as error:
                if self._connection.stopped is None:
                    self._connection.lost(error)
                break
        if self._connection.stopped is not None:
            if self._connection.orphaned:
                orphans.end(self._connection.stopped, self._connection.over)
            self._end_where_stuck(self._connection.stopped)

    def _end_where_stuck(self, reason: str) -> None:
        """Ends this process where nothing else can, once the job has stopped.

        Its main thread may be in a program that waits for others for ever. And where programs span the job, JAX aborts
        a process soon after rank 0 has ended, whatever it does then.
        """
        main = threading.main_thread().ident or 0
        state: object = None
        since = time.monotonic()
        while client.is_connected() and not self._connection.over.wait(_TICK):
            frame = sys._current_frames().get(main)
            stuck = (frame, frame.f_lasti) if frame is not None and program_starts.under_way() is not None else None
            before, state = state, "orphaned" if self._is_orphaned() else stuck
            if state is None or state != before:
                since = time.monotonic()
            elif time.monotonic() - since > _LEAVES_WITHIN:
                print("Traceback (most recent call last):", file=sys.stderr)
                traceback.print_stack(frame)
                print(f"{JobError.__module__}.{JobError.__name__}: {reason}", file=sys.stderr, flush=True)
                self._connection.leave(JobError(reason))
                os._exit(1)

    def _is_orphaned(self) -> bool:
        try:
            return self._rank != 0 and self._connection.has_left(0) is not None
        except RuntimeError:  # the store has ended with it
            return True

    def _look(self) -> None:
        self._connection.check_launcher()
        self._answer()
        if self._connection.stopped is not None:
            return
        self._compare()
        wait = self._connection.wait_now()
        waits = wait is not None and wait.seconds > _PUBLISHED_AFTER
        self._connection.publish("wait", lambda: wait.text() if wait is not None and waits else "")
        if wait is not None and waits:
            self._inspect(wait)
        elif wait is None:
            self._help()

    def _answer(self) -> None:
        """Says where this process is, if somebody asked, and takes note where the job has stopped."""
        news = self._store.add("news", 0)
        if news == self._news:
            return
        self._news = news
        self._asked = time.monotonic()
        if (reason := self._connection.read("broken")) is not None:
            self._connection.stop(reason)
        else:
            self._connection.publish("ran", program_starts.report)
            self._store.set(f"at/{self._rank}", json.dumps([news, line()]))

    def _compare(self) -> None:
        """Looks, now and then, whether others start the same programs: those do not look themselves."""
        if time.monotonic() - self._compared < _COMPARED_EVERY:
            return
        self._compared = time.monotonic()
        self._connection.publish("ran", program_starts.report)
        for rank in program_starts.first_of_groups(self._rank):
            difference = program_starts.difference(self._connection.read(f"ran/{rank}"), rank, self._rank)
            if difference is not None:
                self._connection.break_off(difference)

    def _help(self) -> None:
        """Runs pending collectives, if another process waits for this one and this one has recorded none for a second.

        It may be where nothing of this package is asked, such as in a barrier of PyTorch's own store.
        """
        newest, now = pending_collectives.newest(), time.monotonic()
        if newest is None or newest != self._pending[0]:
            self._pending = (newest, now)
        elif now - self._pending[1] > _PUBLISHED_AFTER:
            self._pending = (newest, now)
            others = [rank for rank in self._connection.everyone if rank != self._rank]
            if any((other := self._wait_of(rank)) is not None and self._rank in other.ranks for rank in others):
                background.start("pending", _run_pending)

    def _inspect(self, wait: Wait) -> None:
        """Looks whether those that this process waits for can come."""
        waits: dict[int, Wait | None] = {self._rank: wait}
        missing = self._missing(wait, waits)
        for rank in missing:
            end = self._connection.end_of(rank)
            if end is not None and not self._has_started(rank, wait):
                self._connection.break_off(
                    f"{end}, and rank {self._rank} waits for it in {wait.what}, at {self._line(self._rank)}"
                )
                return
        blocked = self._blocked(missing, waits)
        suspected, self._suspected = self._suspected, waits if blocked else None
        if blocked:
            if suspected == waits:
                self._confirm(wait, {rank: other for rank in blocked if (other := waits[rank]) is not None})
            return
        absent = [rank for rank in missing if waits[rank] is None] or missing
        if wait.place == program_starts.PLACE and wait.seconds > _config.XLA_COLLECTIVE_PATIENCE.get():
            absent = [rank for rank in absent if not self._has_started(rank, wait)]  # of whom this one does not know
        limit, option = wait.limit, "XLA_JOB_START_TIMEOUT"
        if limit is None:
            limit, option = _config.XLA_COLLECTIVE_TIMEOUT.get(), "XLA_COLLECTIVE_TIMEOUT"
        if wait.seconds > limit:
            self._connection.break_off(
                f"[job] rank {self._rank} waited {wait.seconds:.0f} s in {wait.what}, at {self._line(self._rank)}, for "
                f"{self._places(absent)}; {option} sets how long"
            )
        elif wait.seconds > _config.XLA_COLLECTIVE_PATIENCE.get() and absent:
            text = f"[job] rank {self._rank} has waited {wait.seconds:.0f} s in {wait.what} for {self._places(absent)}"
            _notices.notify("job", (wait.ranks, wait.count), text)

    def _wait_of(self, rank: int) -> Wait | None:
        return parse(self._connection.read(f"wait/{rank}"))

    def _missing(self, wait: Wait | None, waits: dict[int, Wait | None]) -> list[int]:
        """The ranks that have not come to what a process waits for; fills in what they wait for instead."""
        ranks = wait.ranks if wait is not None else ()
        waits.update({rank: self._wait_of(rank) for rank in ranks if rank not in waits})
        return [rank for rank in ranks if wait is not None and not wait.has_come(waits[rank])]

    def _blocked(self, missing: list[int], waits: dict[int, Wait | None]) -> list[int]:
        """These, those whom they wait for, and so on, where each waits for one that has not come; else none."""
        blocked = list(missing)
        for rank in blocked:  # which grows
            others = self._missing(waits[rank], waits)
            if not others:
                return []  # it is on its way
            blocked += [other for other in others if other not in blocked and other != self._rank]
        return blocked

    def _has_started(self, rank: int, wait: Wait) -> bool:
        """Whether a process that waits for nothing has been where this one is: their programs take their time."""
        report = self._connection.read(f"ran/{rank}") if wait.place == program_starts.PLACE else None
        return program_starts.started_by(report, wait.ranks) >= wait.count

    def _confirm(self, wait: Wait, waiting: dict[int, Wait]) -> None:
        """Stops the job if all still wait for each other once they have answered: what they told may be old."""
        lines = {rank: self._line(rank) for rank in sorted(waiting)}
        time.sleep(2 * _TICK)
        now = self._connection.wait_now()
        if None in lines.values() or now != wait:
            return
        if any(self._wait_of(rank) != w for rank, w in waiting.items()):
            return
        others = "; ".join(
            f"rank {rank} waits in {w.what} with ranks {_listed(w.ranks)}, at {lines[rank]}"
            for rank, w in sorted(waiting.items())
        )
        self._connection.break_off(
            f"[job] the processes wait for each other: rank {self._rank} waits in {wait.what} with ranks "
            f"{_listed(wait.ranks)}, at {line()}; {others}"
        )

    def _places(self, ranks: list[int]) -> str:
        return ", ".join(
            f"rank {rank}, which is at {self._line(rank) or 'an unknown line'}"
            if self._store.check([f"taken/{rank}"])
            else f"rank {rank}, which has not joined the job"
            for rank in ranks
        )

    def _line(self, rank: int) -> str | None:
        """The line where a process is now; None if it does not answer."""
        if rank == self._rank:
            return line()
        request_number = self._store.add("news", 1)

        def look() -> str | None:
            self._answer()  # all may ask all, and none would be told
            if self._connection.stopped is not None:
                return ""  # the others have stopped too, and their watches with them
            answer_number, where = json.loads(self._connection.read(f"at/{rank}") or "[0, 0]")
            return str(where) if answer_number >= request_number else None

        return soon(look) or None


def _run_pending() -> None:
    with suppress(Exception):  # which whoever asks for the values gets too, or has stopped the job
        pending_collectives.run()


def _listed(ranks: Ranks) -> str:
    return ", ".join(map(str, ranks))
