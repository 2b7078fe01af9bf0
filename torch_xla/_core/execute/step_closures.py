"""Runs functions after the next barrier, when the values that they look at exist."""

from __future__ import annotations

import atexit
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from torch_xla import _config
from torch_xla._errors import message

Closure = Callable[[], Any]

# For the next barrier, each with whether it may run in the background.
queue: list[tuple[Closure, bool]] = []


class Runner:
    """Runs closures in order in one thread, which lives only while there is something to run.

    The thread is no daemon: the interpreter waits for closures that were accepted before it ended. The limit is how
    many may wait, unless ``XLA_MAX_ASYNC_QUEUE`` says it.
    """

    def __init__(self, limit: int = _config.XLA_MAX_ASYNC_QUEUE.default) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        self._waiting: deque[Closure] = deque()
        self._active = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, closure: Closure) -> None:
        with self._changed:
            self.raise_error()
            limit = _config.XLA_MAX_ASYNC_QUEUE.get() if _config.XLA_MAX_ASYNC_QUEUE.is_set() else self._limit
            self._changed.wait_for(lambda: len(self._waiting) < limit)
            self._waiting.append(closure)
            if not self._active:
                self._active = True
                self._thread = threading.Thread(target=self._run, name="torch_xla-step-closures")
                self._thread.start()

    def raise_error(self) -> None:
        """Raises the error of a closure, once."""
        error, self._error = self._error, None
        if error is not None:
            raise RuntimeError(
                message("sync", "an asynchronous step closure failed earlier", do="see the cause above")
            ) from error

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._waiting or self._error is not None:
                    # What was queued behind a failure would act on a state its author did not expect.
                    self._waiting.clear()
                    self._active = False
                    self._changed.notify_all()
                    return
                closure = self._waiting.popleft()
                self._changed.notify_all()
            try:
                closure()
            except BaseException as error:
                self._error = error

    def drain(self) -> None:
        """Returns when nothing is queued or running; at once inside a closure, which cannot wait for itself."""
        if threading.current_thread() is self._thread:
            return
        with self._changed:
            self._changed.wait_for(lambda: not self._active)


_runner = Runner()


@atexit.register
def _tell_at_exit() -> None:
    """Prints what no barrier came to raise; the interpreter has waited for the closures by then."""
    try:
        _runner.raise_error()
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)  # with its cause, which atexit does not print


def add(closure: Callable[..., Any], args: tuple[Any, ...], background: bool) -> None:
    """Queues ``closure(*args)`` for the next barrier."""
    queue.append((lambda: closure(*args), background))


def run() -> None:
    """Runs what was queued before this barrier; a closure may queue others for the next one."""
    due = queue[:]
    del queue[: len(due)]
    for closure, background in due:
        if background:
            _runner.submit(closure)
    for closure, background in due:
        if not background:
            closure()


def drain() -> None:
    """Waits for asynchronous closures that were started."""
    _runner.drain()
