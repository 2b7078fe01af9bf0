"""The watch: a thread of each process that sees whether those it waits for can come, and says so where they cannot."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from torch_xla import _config, _notices
from torch_xla._core.device import background, client
from torch_xla._core.graph import sequence
from torch_xla._core.job import pending, program_starts
from torch_xla._core.job.connection import Session
from torch_xla._core.job.waits import Ranks, Wait, line
from torch_xla._errors import JobError

_TICK = 0.25  # seconds
_ASKED_TICK, _ASKED_FOR = 0.01, 5.0  # seconds, where somebody asked so lately: who reads by itself waits for an answer
_PUBLISHED_AFTER = 1.0  # seconds of a wait
_ANSWERS_WITHIN = 3.0  # seconds
_COMPARED_EVERY = 1.0  # seconds
_LEAVES_WITHIN = 5.0  # seconds from the end of the job to that of a process that is stuck in a program with others


def start(session: Session) -> threading.Thread:
    """Starts the watch of this process, which ends soon after the process has left the job."""
    thread = threading.Thread(target=_Watch(session).run, name="torch_xla-job", daemon=True)
    thread.start()
    return thread


class _Watch:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._store = session.store
        self._rank = session.rank_info.rank
        self._news = 0
        self._published: str | None = None
        self._suspected: object = None
        self._pending: tuple[int | None, float] = (None, 0.0)
        self._compared = time.monotonic()
        self._asked = 0.0

    def run(self) -> None:
        while self._session.stopped is None and not self._session.over.wait(
            _ASKED_TICK if time.monotonic() - self._asked < _ASKED_FOR else _TICK
        ):
            try:
                self._look()
            except RuntimeError as error:
                if self._session.stopped is None:
                    self._session.lost(error)
                break
        if self._session.stopped is not None:
            self._end_where_stuck(self._session.stopped)

    def _end_where_stuck(self, reason: str) -> None:
        """Ends this process where nothing else can, once the job has stopped.

        Its main thread may be in a program that waits for others for ever. And where programs span the job, JAX aborts
        a process soon after rank 0 has ended, whatever it does then.
        """
        main = threading.main_thread().ident or 0
        state: object = None
        since = time.monotonic()
        while client.met() and not self._session.over.wait(_TICK):
            frame = sys._current_frames().get(main)
            stuck = (frame, frame.f_lasti) if frame is not None and program_starts.under_way() is not None else None
            before, state = state, "orphaned" if self._is_orphaned() else stuck
            if state is None or state != before:
                since = time.monotonic()
            elif time.monotonic() - since > _LEAVES_WITHIN:
                print("Traceback (most recent call last):", file=sys.stderr)
                traceback.print_stack(frame)
                print(f"{JobError.__module__}.{JobError.__name__}: {reason}", file=sys.stderr, flush=True)
                self._session.leave(JobError(reason))
                os._exit(1)

    def _is_orphaned(self) -> bool:
        try:
            return self._rank != 0 and self._session.has_left(0) is not None
        except RuntimeError:  # the store has ended with it
            return True

    def _look(self) -> None:
        self._answer()
        if self._session.stopped is not None:
            return
        self._compare()
        wait = self._session.wait_now()
        waits = wait is not None and wait.seconds > _PUBLISHED_AFTER
        text = _written(wait) if wait is not None and waits else ""
        if text != (self._published or ""):
            self._store.set(f"wait/{self._rank}", text)
            self._published = text
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
        if self._store.check(["broken"]):
            self._session.stop(self._store.get("broken").decode())
        else:
            self._session.tell_programs()
            self._store.set(f"at/{self._rank}", json.dumps([news, line()]))

    def _compare(self) -> None:
        """Looks, now and then, whether others start the same programs: those do not look themselves."""
        if time.monotonic() - self._compared < _COMPARED_EVERY:
            return
        self._compared = time.monotonic()
        self._session.tell_programs()
        for rank in program_starts.first_of_groups(self._rank):
            difference = program_starts.difference(self._told_by(rank), rank, self._rank)
            if difference is not None:
                self._session.break_off(f"[job] the processes differ in what they do together: {difference}")

    def _told_by(self, rank: int) -> str:
        return self._session.read(f"ran/{rank}")

    def _help(self) -> None:
        """Runs pending collectives, if another process waits for this one and this one has recorded none for a second.

        It may be where nothing of this package is asked, such as in a barrier of PyTorch's own store.
        """
        newest, now = pending.newest(), time.monotonic()
        if newest is None or newest != self._pending[0]:
            self._pending = (newest, now)
        elif now - self._pending[1] > _PUBLISHED_AFTER:
            self._pending = (newest, now)
            others = [rank for rank in self._session.everyone if rank != self._rank]
            if any((other := self._wait_of(rank)) is not None and self._rank in other.ranks for rank in others):
                background.start("pending", _run_pending)

    def _inspect(self, wait: Wait) -> None:
        """Looks whether those that this process waits for can come."""
        missing, waits = self._missing(wait)
        for rank in missing:
            why = self._session.has_left(rank)
            if why is not None and not self._has_started(rank, wait):
                self._session.break_off(
                    f"[job] rank {rank} has ended ({why or 'its program was over'}), and rank {self._rank} waits for "
                    f"it in {wait.what}, at {self._line(self._rank)}"
                )
                return
        blocked = self._reached(wait, waits) if missing else []
        waiting = {rank: w for rank, w in waits.items() if w is not None}
        if missing and all(rank in waiting and self._is_kept(rank, waiting[rank], wait, waits) for rank in blocked):
            if self._suspected == (wait.key, waiting):
                self._confirm(wait, {rank: waiting[rank] for rank in blocked})
            self._suspected = wait.key, waiting
            return
        self._suspected = None
        absent = [rank for rank in missing if rank not in waiting] or missing
        if wait.place == program_starts.PLACE and wait.seconds > _config.XLA_COLLECTIVE_PATIENCE.get():
            absent = [rank for rank in absent if not self._has_started(rank, wait)]  # of whom this one does not know
        limit, option = wait.limit, "XLA_JOB_START_TIMEOUT"
        if limit is None:
            limit, option = _config.XLA_COLLECTIVE_TIMEOUT.get(), "XLA_COLLECTIVE_TIMEOUT"
        if wait.seconds > limit:
            self._session.break_off(
                f"[job] rank {self._rank} waited {wait.seconds:.0f} s in {wait.what}, at {self._line(self._rank)}, for "
                f"{self._places(absent)}; {option} sets how long"
            )
        elif wait.seconds > _config.XLA_COLLECTIVE_PATIENCE.get() and absent:
            text = f"[job] rank {self._rank} has waited {wait.seconds:.0f} s in {wait.what} for {self._places(absent)}"
            _notices.tell("job", (wait.ranks, wait.count), text)

    def _wait_of(self, rank: int) -> Wait | None:
        text = self._session.read(f"wait/{rank}")
        if not text:
            return None
        ranks, purpose, count, place, started = json.loads(text)
        return Wait(tuple(ranks), purpose, count, place=place, started=started)

    def _has_started(self, rank: int, wait: Wait) -> bool:
        """Whether a process that waits for nothing has been where this one is: their programs take their time."""
        return (
            wait.place == program_starts.PLACE
            and program_starts.started_by(self._told_by(rank), wait.ranks) >= wait.count
        )

    def _is_kept(self, rank: int, whose: Wait, own: Wait, seen: dict[int, Wait | None]) -> bool:
        """Whether a waiting process is blocked: one that it waits for has not come. Otherwise it is computing."""
        others = {r: own if r == self._rank else seen.get(r) for r in whose.ranks if r != rank}
        return any(not _has_come(other, whose) for other in others.values())

    def _missing(self, wait: Wait) -> tuple[list[int], dict[int, Wait | None]]:
        """Who has not come to a meeting, and what they wait for instead."""
        waits = {rank: self._wait_of(rank) for rank in wait.ranks if rank != self._rank}
        return [rank for rank, other in waits.items() if not _has_come(other, wait)], waits

    def _reached(self, wait: Wait, seen: dict[int, Wait | None]) -> list[int]:
        """All that this process waits for, and that those wait for; fills in what they wait for."""
        reached_ranks: list[int] = []
        todo = [(wait, rank) for rank in wait.ranks if rank != self._rank]
        while todo:
            whose, rank = todo.pop()
            if rank not in seen and rank != self._rank:
                seen[rank] = self._wait_of(rank)
            other = seen.get(rank)
            if rank == self._rank or rank in reached_ranks or _has_come(other, whose):
                continue
            reached_ranks.append(rank)
            if other is not None:
                todo += [(other, r) for r in other.ranks if r != rank]
        return reached_ranks

    def _confirm(self, wait: Wait, waiting: dict[int, Wait]) -> None:
        """Stops the job if all still wait for each other once they have answered: what they told may be old."""
        lines = {rank: self._line(rank) for rank in sorted(waiting)}
        time.sleep(2 * _TICK)
        now = self._session.wait_now()
        if None in lines.values() or now is None or now.key != wait.key:
            return
        if any(self._wait_of(rank) != w for rank, w in waiting.items()):
            return
        others = "; ".join(
            f"rank {rank} waits in {w.what} with ranks {_listed(w.ranks)}, at {lines[rank]}"
            for rank, w in sorted(waiting.items())
        )
        self._session.break_off(
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
        """Where a process is now; None if it does not answer."""
        if rank == self._rank:
            return line()
        request_number = self._store.add("news", 1)

        def look() -> str | None:
            self._answer()  # all may ask all, and none would be told
            if self._session.stopped is not None:
                return ""  # the others have stopped too, and their watches with them
            if not self._store.check([f"at/{rank}"]):
                return None
            answer_number, where = json.loads(self._store.get(f"at/{rank}"))
            return str(where) if answer_number >= request_number else None

        return _soon(look) or None


def _soon(look: Callable[[], str | None]) -> str | None:
    """What a look at the store finds, which others are about to write; None if it is not there in time."""
    deadline = time.monotonic() + _ANSWERS_WITHIN
    while (answer := look()) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return answer


def _run_pending() -> None:
    with suppress(Exception):  # which whoever asks for the values gets too, or has stopped the job
        pending.run()


def _has_come(other: Wait | None, wait: Wait) -> bool:
    same = other is not None and (other.ranks, other.place) == (wait.ranks, wait.place)
    return same and other is not None and max(other.count, other.started) >= wait.count


def _written(wait: Wait) -> str:
    return json.dumps([wait.ranks, wait.what, wait.count, wait.place, wait.started])


def _listed(ranks: Ranks) -> str:
    return ", ".join(map(str, ranks))


def explain(session: Session, error: str) -> str | None:
    """What a failure of a collective comes from, as far as the others tell; stops the job.

    Gives the reason, or None where it was no collective whose run raised the error.
    """
    failed = program_starts.take_failure()
    if failed is None and "[collective]" not in error and "[job]" not in error:
        return None
    if session.stopped is not None:
        return session.stopped
    text = (error if failed is not None else error[error.index("[") :]).splitlines()[0]
    try:
        differing = re.search(r"is about to run (-?\d+), rank (\d+) (-?\d+)", text)
        if differing:
            text = _difference(session, int(differing[1]), int(differing[2]), int(differing[3]))
        else:
            place = re.search(r"; it was in (.* of ranks [\d, ]+)$", text)
            operation = place[1] if place else failed.what if failed is not None else "a collective"
            position = f"rank {session.rank_info.rank} was in {operation}"
            position += f", at {line(threading.get_ident())}"
            text = _who_left(session, position) or f"[job] {position}, which failed: {text}"
    except RuntimeError as lost:
        session.lost(lost)
    session.break_off(text)
    return session.stopped


def _who_left(session: Session, own: str) -> str | None:
    def look() -> str | None:
        if session.store.check(["broken"]):
            return str(session.store.get("broken").decode())
        own_rank = session.rank_info.rank
        for rank in session.everyone:
            if rank != own_rank and (why := session.has_left(rank)) is not None:
                if (difference := program_starts.difference(session.read(f"ran/{rank}"), rank, own_rank)) is not None:
                    return f"[job] the processes differ in what they do together: {difference}"
                return f"[job] rank {rank} has ended ({why or 'its program was over'}) while {own}"
        return None

    return _soon(look)


def _difference(session: Session, own: int, other: int, theirs: int) -> str:
    """What two processes are about to run, once both have told theirs."""
    rank = session.rank_info.rank
    session.store.set(f"about/{own}", json.dumps(sequence.meaning(own)))
    key = f"about/{theirs}"
    answer = _soon(lambda: session.store.get(key).decode() if session.store.check([key]) else None)
    other_meaning = sequence.meaning(theirs) if answer is None else json.loads(answer)
    (low, first), (high, second) = sorted([(rank, sequence.meaning(own)), (other, other_meaning)])
    return (
        f"[job] the processes differ in what they do together: rank {low} runs {sequence.said(first)}, "
        f"rank {high} runs {sequence.said(second)}"
    )
