"""What happened when, while `torch_xla.debug.profile` runs: spans of the stages, and moments with what is known there.

There is one recorder in the process, or none. Without one, `span` and `mark` check that and do nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from time import perf_counter
from typing import Any, NamedTuple

from torch_xla import _capture

# Some 200 bytes each; a loop that is profiled for hours must not fill the host's memory.
_MOST = 2_000_000


class Span(NamedTuple):
    """Something that took time: a stage of the pipeline, or a wait.

    Attributes:
        stage: Name of the stage; of a metric where a metric counts the same.
        start: When it began, in seconds of `time.perf_counter`.
        end: When it was over.
        thread: Identity of the thread.
        detail: What is known beside, by stage.
    """

    stage: str
    start: float
    end: float
    thread: int
    detail: Any


class Mark(NamedTuple):
    """Something that was noticed at one moment; as `Span`."""

    kind: str
    time: float
    thread: int
    detail: Any


class Launch(NamedTuple):
    """A program that was started on a device.

    Attributes:
        device: Index of the device.
        key: The graph's structural key.
        start: When starting it began.
        executable: What runs.
        token: Can be waited for.
    """

    device: int
    key: str
    start: float
    executable: Any
    token: Any


class Recorder:
    """Collects what the stages tell."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.marks: list[Mark] = []
        self.dropped = 0

    def add(self, stage: str, start: float, end: float, detail: Any = None) -> None:
        """Keeps a span of the calling thread."""
        self.keep(Span(stage, start, end, threading.get_ident(), detail))

    def keep(self, span: Span) -> None:
        """Keeps a span."""
        if len(self.spans) < _MOST:
            self.spans.append(span)
        else:
            self.dropped += 1

    def launched(self, launch: Launch) -> None:
        """Takes notice of a program that was started."""


class _Running:
    """A span that is being timed."""

    def __init__(self, to: Recorder, stage: str, detail: Any) -> None:
        self._to, self._stage, self._detail = to, stage, detail

    def __enter__(self) -> None:
        self._start = perf_counter()

    def __exit__(self, *_: object) -> None:
        self._to.add(self._stage, self._start, perf_counter(), self._detail)


class _Nothing:
    __enter__ = __exit__ = "".format  # a C function that gives an empty text, so that errors pass


# A scope in which nothing happens. A barrier passes several, and `contextlib.nullcontext` is Python code.
NOTHING: Any = _Nothing()

recorder: Recorder | None = None


def start(to: Recorder) -> None:
    """Gives everything to a recorder from now on."""
    global recorder
    recorder = to


def stop() -> None:
    """Ends that."""
    global recorder
    recorder = None


def span(stage: str, detail: Callable[[], Any] | None = None) -> AbstractContextManager[Any]:
    """A block to be timed.

    Args:
        stage: Its name.
        detail: Gives what is known beside; called only while a recorder runs.
    """
    to = recorder
    if to is None and not _capture.on:
        return NOTHING
    known = detail() if detail is not None else None
    if not _capture.on:
        assert to is not None
        return _Running(to, stage, known)
    blocks = ExitStack()
    blocks.enter_context(_capture.Row(stage, known))
    if to is not None:
        blocks.enter_context(_Running(to, stage, known))
    return blocks


def add(stage: str, start: float, end: float) -> None:
    """Keeps a block that was timed elsewhere."""
    if recorder is not None:
        recorder.add(stage, start, end)


def mark(kind: str, *detail: Any) -> None:
    """Keeps a moment."""
    to = recorder
    if to is not None:
        to.marks.append(Mark(kind, perf_counter(), threading.get_ident(), detail))


def launched(device: int, key: str, start: float, executable: Any, token: Any) -> None:
    """Tells of a program that was started; as `Launch`."""
    if recorder is not None:
        recorder.launched(Launch(device, key, start, executable, token))
