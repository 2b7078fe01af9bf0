"""Runs background threads that end before the interpreter does: a daemon thread that returns to it then aborts it."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from typing import Any

_SECONDS = 2.0  # for all of them together
_running: dict[threading.Thread, Callable[[], object] | None] = {}
_lock = threading.Lock()
_registered = False


def start(
    name: str, target: Callable[..., object], *arguments: Any, stop: Callable[[], object] | None = None
) -> threading.Thread:
    """Starts a thread; the name says what it does, for those who look at threads.

    `stop` is called at the end of the program, to have it end; without one it is only waited for.
    """
    global _registered
    thread = threading.Thread(target=target, args=arguments, name=f"torch_xla-{name}", daemon=True)
    with _lock:
        if not _registered:
            _registered = True
            atexit.register(end)
        for other in [other for other in _running if not other.is_alive()]:
            del _running[other]
        thread.start()
        _running[thread] = stop
    return thread


def end() -> None:
    """Waits, for a short time, until the threads have ended; at the end of the program."""
    with _lock:
        threads = dict(_running)
        _running.clear()
    for stop in threads.values():
        if stop is not None:
            stop()
    deadline = time.monotonic() + _SECONDS
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
