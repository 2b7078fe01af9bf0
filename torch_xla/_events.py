"""Publishes events: spans of the stages, moments, and programs that are started; sinks receive them.

`torch_xla.debug.profile` and a capture of JAX's profiler are sinks. Mostly there is none, and an event costs a check.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from time import perf_counter
from typing import Any, NamedTuple

from torch_xla import _bindings


class Launch(NamedTuple):
    """A program that was started: when that began, the graph's key, what runs, and what can be waited for."""

    device: int
    key: str
    start: float
    executable: Any
    token: Any


class _Nothing:
    __enter__ = __exit__ = "".format  # a C function that gives an empty text, so that errors pass


# A scope in which nothing happens. A barrier passes several, and `contextlib.nullcontext` is Python code.
NOTHING: Any = _Nothing()


class Sink:
    """A receiver of events; it overrides the methods of those that it needs."""

    def span(self, stage: str, detail: Any) -> AbstractContextManager[Any]:
        """Gives a scope that is entered when a stage begins and left when it ends."""
        scope: AbstractContextManager[Any] = NOTHING
        return scope

    def mark(self, kind: str, detail: tuple[Any, ...]) -> None:
        """Takes notice of something that is so at this moment."""

    def launched(self, launch: Launch) -> None:
        """Takes notice of a program that was started."""


sinks: tuple[Sink, ...] = ()
_lock = threading.Lock()


def listen(sink: Sink) -> None:
    """Gives everything to a sink from now on."""
    global sinks
    with _lock:
        sinks = (*sinks, sink)


def leave(sink: Sink) -> None:
    """Gives nothing more to a sink."""
    global sinks
    with _lock:
        sinks = tuple(other for other in sinks if other is not sink)


def span(stage: str, detail: Callable[[], Any] | None = None) -> AbstractContextManager[Any]:
    """A block to be timed; a stage that a metric counts too has its name.

    `detail` is asked only where somebody listens.
    """
    listening = sinks
    if not listening:
        scope: AbstractContextManager[Any] = NOTHING
        return scope
    metadata = detail() if detail is not None else None
    scopes = ExitStack()
    for sink in listening:
        scopes.enter_context(sink.span(stage, metadata))
    return scopes


class timed:
    """A span whose duration in seconds is a sample of the metric of its name too, also when it raises."""

    __slots__ = ("_name", "_scope", "_start")

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        self._scope = span(self._name)
        self._scope.__enter__()
        self._start = perf_counter()

    def __exit__(self, *error: Any) -> None:
        _bindings.add_sample(self._name, perf_counter() - self._start)
        self._scope.__exit__(*error)


def mark(kind: str, *detail: Any) -> None:
    """Tells of something that is so at this moment."""
    for sink in sinks:
        sink.mark(kind, detail)


def launched(device: int, key: str, start: float, executable: Any, token: Any) -> None:
    """Tells of a program that was started; as `Launch`."""
    for sink in sinks:
        sink.launched(Launch(device, key, start, executable, token))
