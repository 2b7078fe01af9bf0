"""Ends a process that nobody waits for any more: whoever started it has ended, or the store of its job is gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

_LOOK = 0.25  # seconds between two looks
_LEAVES_WITHIN = 4.0  # seconds in which it may end by itself
_KILLED_WITHIN = 3.0  # seconds from then, for handlers of its own

_followed: tuple[int, int] | None = None  # this process, which a fork of it is not, and its parent
_ending = threading.Lock()


def follow_launcher(when_gone: Callable[[], None]) -> None:
    """Starts a thread that calls this once the process that started this one has ended.

    The kernel's signal to orphans would not come to those whose parent is a server that they were forked from.
    """
    global _followed
    if _followed is None or _followed[0] != os.getpid():
        _followed = os.getpid(), os.getppid()
        threading.Thread(target=_follow, args=(when_gone,), name="torch_xla-launcher", daemon=True).start()


def launcher_is_gone() -> bool:
    """Whether the process that is followed has ended.

    Who asks its store first gets PyTorch's words for it, and a stack of C++.
    """
    if _followed is None or _followed[0] != os.getpid():
        return False
    launcher = multiprocessing.parent_process()
    return os.getppid() != _followed[1] if launcher is None else not launcher.is_alive()


def _follow(when_gone: Callable[[], None]) -> None:
    while not launcher_is_gone():
        time.sleep(_LOOK)
    when_gone()


def end(reason: str, over: threading.Event) -> None:
    """Tells the reason and ends this process, wherever its main thread is, unless that is `over` soon.

    A wait of it raises the reason by itself. The end is as its launcher would do it: first by the signal that programs
    may handle.
    """
    if not _ending.acquire(blocking=False):
        return
    if not over.wait(_LEAVES_WITHIN):
        print(reason, file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        if not over.wait(_KILLED_WITHIN):
            os._exit(1)
