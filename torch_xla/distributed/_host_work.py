"""Collectives of CPU tensors while they are under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import Work

from torch_xla._core.device import background
from torch_xla._core.execute.untraced import untraced
from torch_xla._core.job import failed_collective, session
from torch_xla._core.job.connection import Connection
from torch_xla._core.job.waits import Wait
from torch_xla._errors import JobError

_TURN = timedelta(milliseconds=100)
_LOOK = 1.0  # seconds between two looks whether who sends is there
_FOREVER = timedelta(0)


class Done(Work):
    """The handle of what is recorded, or was done at once: whoever reads the results waits for them.

    PyTorch's own, of a future, refuses to wait with a limit.
    """

    def __init__(self, result: Any = None) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Returns at once."""
        return True

    def synchronize(self) -> None:
        """Returns when it is there."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it is there."""
        return True

    def is_success(self) -> bool:
        """Whether it is there and did not fail."""
        return True

    def exception(self) -> Any:
        """Why it failed."""
        return None

    def result(self) -> Any:
        """The tensors."""
        return self._result

    def get_future(self) -> torch.futures.Future:
        """A future that has the tensors."""
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self.result())
        return future


class HostWork(Done):
    """The work of PyTorch's host group; the job sees who waits for it, and ends the wait when it stops.

    `start` starts the work and gives it, `what` says in words what it does, `ranks` take part. `place` is the group and
    the number of this collective in it; None where only those ranks are waited for.
    """

    def __init__(
        self, start: Callable[[], Any], what: str, ranks: Sequence[int], place: tuple[str, int] | None = None
    ) -> None:
        super().__init__()
        self._what = f"{what.strip('_').removesuffix('_base')} of CPU tensors"
        self._ranks = session.as_ranks(ranks)
        self._place = place
        self._after: Callable[[], object] | None = None
        self._finished = False
        connection = session.connected()
        try:
            self._work = start()
        except RuntimeError as error:  # of a message, whose other end has gone already
            if connection is None or place is not None:
                raise
            raise self._explained(connection, error) from None

    def _explained(self, connection: Connection, error: RuntimeError) -> JobError:
        return JobError(failed_collective.explain(connection, f"[collective] {self._what}: {error}"))

    def then(self, after: Callable[[], object] | None, result: Any) -> HostWork:
        """Runs `after` once it is there; returns this, whose result is `result`."""
        self._after, self._result = after, result
        return self

    @untraced
    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Returns when it is there; JobError where it cannot come."""
        if self._finished:
            return True
        connection = session.connected()
        if connection is None:
            self._work.wait()
        elif self._place is None:
            self._poll(connection, timeout)
        else:
            group, count = self._place
            with connection.waiting(Wait(self._ranks, self._what, count, place=f"host {group}")):
                self._poll(connection, timeout)
        self._finished = True
        if self._after is not None:
            self._after()
        return True

    def _poll(self, connection: Connection, timeout: timedelta) -> None:
        turn = self._in_thread() if self._place is None else self._turn
        start = looked = time.monotonic()
        while True:
            connection.check()
            try:
                if turn():
                    return
            except RuntimeError as error:
                raise self._explained(connection, error) from None
            now = time.monotonic()
            if timeout > _FOREVER and now - start > timeout.total_seconds():
                raise RuntimeError(f"[process group] {self._what} took more than {timeout}")
            if self._place is None and now - looked > _LOOK:
                looked = now
                self._look(connection)

    def _turn(self) -> bool:
        """Waits for a moment; whether it is there."""
        try:
            self._work.wait(_TURN)
        except RuntimeError:
            if not self._work.is_completed():
                return False
            self._work.wait()  # it may have come since the wait gave up
        return True

    def _in_thread(self) -> Callable[[], bool]:
        """Waits for a message in a thread: the group closes a connection over which it does not come in time."""
        done = threading.Event()
        failed: list[RuntimeError] = []

        def work() -> None:
            try:
                self._work.wait()
            except RuntimeError as error:
                failed.append(error)
            done.set()

        background.start("message", work)

        def turn() -> bool:
            there = done.wait(_TURN.total_seconds())
            if failed:
                raise failed[0]
            return there

        return turn

    def _look(self, connection: Connection) -> None:
        """Looks whether whoever sends or receives can come."""
        for rank in self._ranks:
            if (end := connection.end_of(rank)) is not None:
                connection.fail(f"{end}, and rank {connection.rank_info.rank} waits for it in {self._what}")

    def is_completed(self) -> bool:
        """Whether it is there."""
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        """Whether it is there and did not fail."""
        return bool(self._work.is_success())

    def exception(self) -> Any:
        """Why it failed."""
        return self._work.exception()

    @untraced
    def result(self) -> Any:
        """The tensors."""
        self.wait()
        return self._work.result() if self._result is None else self._result

    def _source_rank(self) -> int:
        return int(self._work._source_rank())
