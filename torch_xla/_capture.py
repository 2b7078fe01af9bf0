"""The host's rows in a capture of JAX's profiler: stages of the pipeline, the recording between them, and named blocks.

Rows are written only while a capture may run: between `start_trace` and `stop_trace`, or beside a profiler server.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch_xla import _events

_ROWS = {
    "LoweringTime": "lowering",
    "CompileTime": "compiling",
    "packing": "compiling how values are packed",
    "ExecuteTime": "starting the program",
    "TransferToDeviceTime": "TransferToDevice",
    "TransferFromDeviceTime": "TransferFromDevice",
    "read": "reading a value",
    "wait": "waiting for the device",
    "loader": "waiting for the loader",
}
_RECORDING = "recording"
_PAUSES = {"barrier", "read"}  # in which nothing is recorded

_lock = threading.Lock()
_reasons = 0  # captures and servers
_annotate: Callable[..., AbstractContextManager[Any]]
_mine = threading.local()


class _Blocks(threading.local):
    """Names of the blocks that this thread is in, the outermost first."""

    def __init__(self) -> None:
        self.names: list[str] = []


blocks = _Blocks()


def enable(annotate: Callable[..., AbstractContextManager[Any]]) -> None:
    """Writes rows from now on, until as many `disable` as `enable`.

    `annotate` makes one of its name and values to show.
    """
    global _reasons, _annotate
    with _lock:
        _annotate = annotate
        _reasons += 1
        if _reasons == 1:
            _events.listen(_rows)


def disable() -> None:
    """Takes an `enable` back."""
    global _reasons
    pause()
    with _lock:
        _reasons -= 1
        if not _reasons:
            _events.leave(_rows)


class _Row:
    """A stage, of which a row is written."""

    def __init__(self, stage: str, detail: Any) -> None:
        self._stage = stage
        self._values = {} if detail is None else {"detail": str(detail)}
        self._pauses = stage in _PAUSES

    def __enter__(self) -> None:
        if self._pauses:
            pause()
        self._row = _annotate(_ROWS.get(self._stage, self._stage), **self._values)  # it begins when it is made
        self._row.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._pauses:
            pause()
        self._row.__exit__(*error)
        if self._pauses:
            resume()


class _Rows(_events.Sink):
    def span(self, stage: str, detail: Any) -> _Row:
        return _Row(stage, detail)


_rows = _Rows()


def on() -> bool:
    """Whether rows are written."""
    return _reasons > 0


def pause() -> None:
    """Ends this thread's row of recording, if it has one."""
    row = getattr(_mine, "recording", None)
    if row is not None:
        _mine.recording = None
        row.__exit__(None, None, None)


def resume() -> None:
    """Begins it anew."""
    if on():
        pause()
        _mine.recording = _annotate(_RECORDING)
        _mine.recording.__enter__()
