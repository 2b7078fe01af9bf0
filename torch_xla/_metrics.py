"""Counters and timed metrics of the process, shared by every stage."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch_xla import _bindings

_lock = threading.Lock()
_counters: defaultdict[str, int] = defaultdict(int)
_sources: dict[str, Callable[[], int]] = {}  # counts kept elsewhere, such as in the recorder
_groups: list[Callable[[], dict[str, int]]] = []  # likewise, under names that only they know
_cleared: dict[str, int] = {}  # what those stood at when last cleared


@dataclass(slots=True)
class Metric:
    """A measured quantity."""

    unit: str  # ``"seconds"``, ``"bytes"`` or ``"count"``
    count: int  # number of samples ever added
    total: float
    samples: list[tuple[float, float]]  # the latest as (time in seconds since the epoch, value)
    each: int = 1  # how many calls each of those stands for, where only some are timed


def count(name: str, by: int = 1) -> None:
    """Adds to a counter."""
    _counters[name] += by  # there is no call in it, so no other thread comes between; a lock would cost five times that


def provide(name: str, source: Callable[[], int]) -> None:
    """Makes a number that is counted elsewhere appear as a counter once it is above zero."""
    _sources[name] = source


def provide_group(source: Callable[[], dict[str, int]]) -> None:
    """Makes numbers that are counted elsewhere appear as counters, by name."""
    _groups.append(source)


def _standing() -> dict[str, int]:
    counts = {name: source() for name, source in _sources.items()}
    for group in _groups:
        counts.update(group())
    return counts


def _provided() -> dict[str, int]:
    counts = {name: value - _cleared.get(name, 0) for name, value in _standing().items()}
    return {name: value for name, value in counts.items() if value}


# (name, value, unit="seconds"): adds one sample to a metric.
add_sample = _bindings.add_sample


@contextmanager
def eager_operation() -> Iterator[None]:
    """A scope whose compiles and runs count as those of single operations."""
    _bindings.set_eager_operation(True)
    try:
        yield
    finally:
        _bindings.set_eager_operation(False)


def stage(name: str) -> str:
    """Name of the metric for a stage of the pipeline: eager operations have their own."""
    return f"EagerOp{name}" if _bindings.in_eager_operation() else name


def waited(start: float) -> None:
    """Says that the host waited for the device since `start`, as `time.perf_counter` gives it."""
    _bindings.note_wait(time.perf_counter() - start)


def counter(name: str) -> int | None:
    """A counter's value, or None if nothing was ever counted under that name."""
    own_count = _counters.get(name)
    if name in _sources:
        return (own_count or 0) + _sources[name]() - _cleared.get(name, 0) or None
    return own_count if own_count is not None or "::" not in name else _provided().get(name)


def metric(name: str) -> Metric | None:
    """A metric, or None if it has no samples."""
    fields = _bindings.metric(name)
    return None if fields is None else Metric(*fields)


def counter_names() -> list[str]:
    """Names of all counters, sorted."""
    return sorted({*_counters, *_provided()})


def host_ops() -> list[str]:
    """Names of the counters of operators that ran on the host, and of reads, sorted."""
    return [name for name in counter_names() if "::" in name and not name.startswith("xla::")]


def metric_names() -> list[str]:
    """Names of all metrics, sorted."""
    return _bindings.metric_names()


def clear_counters() -> None:
    """Forgets all counters."""
    with _lock:
        _counters.clear()
        _cleared.update(_standing())


def clear_metrics() -> None:
    """Forgets all metrics."""
    _bindings.clear_metrics()
