"""Runs slow calls in a thread of their own: the main thread can be interrupted, and shows that time passes.

A signal handler may compute tensors meanwhile, which it could not within JAX's tracing.
"""

from __future__ import annotations

import _thread
import contextvars
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

# When the line appears, and how often it is drawn.
_PATIENCE_SECONDS = 2.0
_REDRAW_SECONDS = 0.25


def call(function: Callable[[], T], label: str) -> T:
    """Calls a function; on a terminal a line tells of it, by the label, once it takes over two seconds.

    An interrupt reaches the caller at once while the function goes on. Its thread is no daemon: the interpreter waits
    for it at its end, because XLA's threads crash when the process is torn down under them.
    """
    if threading.current_thread() is not threading.main_thread():
        return function()
    results: list[T] = []
    # Not in a future: an error knows this function's variables, and would hold itself and the caller's with them.
    raised: list[BaseException] = []
    # Plain locks: a condition, by which threads and futures tell, is left in disorder by an interrupt in its midst.
    done = _thread.allocate_lock()
    done.acquire()

    def run() -> None:
        try:
            results.append(function())
        except BaseException as error:
            raised.append(error)
        finally:
            done.release()

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name="torch_xla-compile")

    def start() -> None:
        try:
            thread.start()  # it waits for such a condition
        except BaseException as error:
            raised.append(error)
            done.release()

    try:
        _thread.start_new_thread(start, ())
        if not _is_watched():
            done.acquire()
        elif not done.acquire(timeout=_PATIENCE_SECONDS):
            with _line(label) as line:
                while not done.acquire(timeout=_REDRAW_SECONDS):
                    line.refresh()
    except BaseException as error:
        error.torch_xla_foreign = True  # type: ignore[attr-defined]  # an attribute of our own
        raise
    if raised:
        raise raised.pop()
    return results.pop()


def is_foreign(error: BaseException) -> bool:
    """Whether an exception is no failure of what was called, but came from a signal handler meanwhile."""
    return getattr(error, "torch_xla_foreign", False)


def _is_watched() -> bool:
    """Whether somebody sees a line that changes: in a terminal, or a notebook."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def _line(label: str) -> Any:
    import time

    from tqdm import tqdm

    line = tqdm(desc=label, bar_format="{desc} {elapsed}", leave=False, file=sys.stderr)
    line.start_t = time.time() - _PATIENCE_SECONDS
    return line
