"""The processes that a launcher started: waiting for them, and which of several failures was the first."""

from __future__ import annotations

import math
import multiprocessing.connection
import pickle
import signal
import time
from contextlib import suppress
from typing import Any

from torch.multiprocessing.spawn import ProcessContext, ProcessExitedException, ProcessRaisedException

from torch_xla._core.device.environment import RankInfo
from torch_xla._core.job import store
from torch_xla._core.job.waits import until

_EXIT_TIMEOUT = 5.0  # seconds in which the others learn of a failure and end themselves
KILL_TIMEOUT = 3.0  # seconds from being asked to end to being killed


class Processes(ProcessContext):
    """PyTorch's context of processes that it waits for, which tells the others of each that has ended.

    `error_files` are where each writes its traceback; `server` is the store at which they meet, which listens as long
    as they may ask, `try_name` tells what is of these; `host` is this one among those of the job.
    """

    def __init__(
        self, processes: list[Any], error_files: list[str], server: Any, try_name: str, host: RankInfo
    ) -> None:
        super().__init__(processes, error_files)
        self._store = store.prefix(f"torch_xla/{try_name}", server)
        self._host = host
        self._first = host.rank * len(processes)
        self._failed: list[int] = []  # in the order in which they ended

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        """Waits for processes to end, at most `timeout` seconds, and says whether all have.

        Where one failed the others have `grace_period` seconds to end themselves. Raises
        torch.multiprocessing.ProcessRaisedException for the process whose failure the others followed,
        ProcessExitedException where it was killed, or exited with an error.
        """
        try:
            self._take_ended(timeout)
            if not self._failed:
                if self.sentinels:
                    return False
                self._wait_for_hosts()
                return True
            deadline = time.monotonic() + (_EXIT_TIMEOUT if grace_period is None else grace_period)
            while self.sentinels and (seconds_left := deadline - time.monotonic()) > 0:
                self._take_ended(seconds_left)
        except BaseException:  # an interrupt
            self._end_all()
            raise
        self._end_all()
        cause = next((i for i in self._failed if not self._followed(i)), self._failed[0])
        self._wait_for_hosts(_EXIT_TIMEOUT + KILL_TIMEOUT)
        raise self._error(cause)

    def _followed(self, index: int) -> bool:
        """Whether a process failed because of another."""
        with suppress(RuntimeError):  # the store is on another host, which is gone
            return bool(self._store.check([f"followed/{self._first + index}"]))
        return False

    def _wait_for_hosts(self, seconds: float = math.inf) -> None:
        """Keeps the store, if it is on this host, until the other hosts' processes have ended, up to a limit."""
        with suppress(RuntimeError):
            self._store.add("hosts", 1)
            if self._host.rank == 0:
                until(lambda: self._store.add("hosts", 0) >= self._host.world or None, 0.05, seconds=seconds)

    def _take_ended(self, timeout: float | None) -> None:
        ended: Any = multiprocessing.connection.wait(list(self.sentinels), timeout)
        for index in sorted(map(self.sentinels.pop, ended)):
            self.processes[index].join()
            code = self.processes[index].exitcode
            with suppress(RuntimeError):
                store.tell_end(self._store, self._first + index, "" if code == 0 else self._why(index))
            if code != 0:
                self._failed.append(index)

    def _end_all(self) -> None:
        running = [self.processes[index] for index in self.sentinels.values()]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + KILL_TIMEOUT
        for process in running:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
            process.join()
        self.sentinels.clear()

    def _trace(self, index: int) -> str | None:
        try:
            with open(self.error_files[index], "rb") as file:
                return str(pickle.load(file))
        except OSError:
            return None  # it did not raise

    def _said(self, index: int) -> str | None:
        """The last message of a process that left the job, if it could send no more than that."""
        with suppress(RuntimeError):  # the store is on another host, which is gone
            if self.processes[index].exitcode == 1:
                return store.read(self._store, f"left/{self._first + index}") or None
        return None

    def _why(self, index: int) -> str:
        trace = self._trace(index)
        return _how(self.processes[index].exitcode) if trace is None else trace.strip().splitlines()[-1]

    def _error(self, index: int) -> Exception:
        process, trace, rank = self.processes[index], self._trace(index) or self._said(index), self._first + index
        if trace is None:
            code = process.exitcode
            text = f"process {rank} terminated with "
            if name := _signal(code):
                return ProcessExitedException(text + f"signal {name}", index, process.pid, code, name)
            return ProcessExitedException(text + f"exit code {code}", index, process.pid, code)
        return ProcessRaisedException(
            f"\n\n-- Process {rank} terminated with the following error:\n{trace}", index, process.pid
        )


def _signal(code: int) -> str | None:
    if code >= 0:
        return None
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"<Unknown signal {-code}>"


def _how(code: int) -> str:
    return f"it was ended by {_signal(code)}" if code < 0 else f"it exited with code {code}"
