"""Running jobs in worker processes: a crash or a hang of one job is its result, and a new worker goes on."""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from opdb.cases import Job

_TESTS = Path(__file__).resolve().parent.parent
_JOBS_PER_PROCESS = 400  # then a fresh one, so that memory stays bounded
_START_UP = 60  # seconds for the imports of a new process


class _Worker:
    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.errors: IO[str] | None = None
        self.done = 0

    def ask(self, job: Job, limit: float) -> dict[str, Any]:
        """The result of a job, as JSON."""
        if self.process is None or self.done >= _JOBS_PER_PROCESS:
            self.stop()
            self._start()
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        self.done += 1
        started = time.monotonic()
        try:
            self.process.stdin.write(json.dumps(asdict(job)) + "\n")
            self.process.stdin.flush()
            # The first job of a process also waits for its imports.
            ready, _, _ = select.select([self.process.stdout], [], [], limit + _START_UP * (self.done == 1))
            line = self.process.stdout.readline() if ready else None
        except BrokenPipeError:
            line = ""
        if line:
            return json.loads(line)
        if line is None:
            status, text = "hang", f"no result within {time.monotonic() - started:.0f} s"
        else:
            status, text = "crash", self._death()
        self.stop(kill=True)
        return {**asdict(job), "status": status, "messages": [text], "samples": 0}

    def stop(self, kill: bool = False) -> None:
        """Ends the process."""
        if self.process is None:
            return
        if kill:
            self.process.kill()
        elif self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.process.__exit__(None, None, None)  # closes the pipes and waits
        if self.errors is not None:
            self.errors.close()
        self.process = self.errors = None

    def _start(self) -> None:
        path = os.pathsep.join([str(_TESTS.parent), str(_TESTS), os.environ.get("PYTHONPATH", "")])
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "opdb.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        self.done = 0

    def _death(self) -> str:
        assert self.process is not None and self.errors is not None
        code = self.process.wait()
        self.errors.seek(0)
        tail = " ".join(self.errors.read()[-300:].split())
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return f"the process ended with {how}: {tail}"


def run(jobs: Iterable[Job], workers: int, limit: float, done: Callable[[dict[str, Any]], None]) -> None:
    """Runs jobs.

    Args:
        jobs: The jobs.
        workers: Number of processes.
        limit: Seconds a job may take.
        done: Called with each result, from one thread at a time.
    """
    waiting: queue.SimpleQueue[Job] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    lock = threading.Lock()

    def serve() -> None:
        worker = _Worker()
        try:
            while True:
                try:
                    job = waiting.get_nowait()
                except queue.Empty:
                    return
                result = worker.ask(job, limit)
                with lock:
                    done(result)
        finally:
            worker.stop()

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
