"""Slow calls run in a thread of their own: the main thread can be interrupted, and shows that time passes.

A signal handler may compute tensors meanwhile, which it could not in the midst of JAX's tracing.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar, cast

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
    outcome: Future[T | None] = Future()
    # Not in the future: an error knows this function's variables, and would hold itself and the caller's with them.
    raised: list[BaseException] = []

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            raised.append(error)
            outcome.set_result(None)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), name="torch_xla-compile")
    try:
        thread.start()
        if _is_watched() and not wait([outcome], _PATIENCE_SECONDS).done:
            with _line(label) as line:
                while not wait([outcome], _REDRAW_SECONDS).done:
                    line.refresh()
        result = outcome.result()
    except BaseException as error:
        error.torch_xla_foreign = True  # type: ignore[attr-defined]  # an attribute of our own
        raise
    if raised:
        raise raised.pop()
    return cast(T, result)


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
