"""Counters and timed metrics of the process, shared by every stage."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch_xla import _capture, _timeline

_SAMPLES = 1024

_lock = threading.Lock()
_counters: defaultdict[str, int] = defaultdict(int)
_metrics: dict[str, Metric] = {}
_sources: dict[str, Callable[[], int]] = {}  # counts kept elsewhere, such as in the recorder
_groups: list[Callable[[], dict[str, int]]] = []  # likewise, under names that only they know
_eager = threading.local()
_timings: list[Callable[[], dict[str, Timing]]] = []  # likewise, of durations
_cleared: dict[str, int] = {}  # what those stood at when last cleared
_forgotten: dict[str, tuple[int, float]] = {}  # likewise, of durations: calls and seconds
_forgotten_at = 0.0


# Durations that are kept elsewhere: calls, seconds, the latest samples, and `each`, as in `Metric`.
Timing = tuple[int, float, list[tuple[float, float]], int]


@dataclass(slots=True)
class Metric:
    """A measured quantity.

    Attributes:
        unit: ``"seconds"``, ``"bytes"`` or ``"count"``.
        count: Number of samples ever added.
        total: Sum of all samples.
        samples: The latest samples as (time in seconds since the epoch, value).
        each: How many calls each of those stands for, where only some are timed.
    """

    unit: str
    count: int = 0
    total: float = 0.0
    samples: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    each: int = 1


def count(name: str, by: int = 1) -> None:
    """Adds to a counter."""
    _counters[name] += by  # there is no call in it, so no other thread comes between; a lock would cost five times that


def provide(name: str, source: Callable[[], int]) -> None:
    """Makes a number that is counted elsewhere appear as a counter once it is above zero."""
    _sources[name] = source


def provide_group(source: Callable[[], dict[str, int]]) -> None:
    """Makes numbers that are counted elsewhere appear as counters, by name."""
    _groups.append(source)


def provide_timings(source: Callable[[], dict[str, Timing]]) -> None:
    """Makes durations that are measured elsewhere appear as metrics, by name, once there are some."""
    _timings.append(source)


def _timed_elsewhere() -> dict[str, Metric]:
    found = {}
    for source in _timings:
        for name, (calls, seconds, samples, each) in source().items():
            calls_before, seconds_before = _forgotten.get(name, (0, 0.0))
            if calls > calls_before:
                latest = deque(((when, took) for when, took in samples if when >= _forgotten_at), _SAMPLES)
                total = max(seconds - seconds_before, 0.0)
                found[name] = Metric("seconds", calls - calls_before, total, latest, each)
    return found


def _standing() -> dict[str, int]:
    counts = {name: source() for name, source in _sources.items()}
    for group in _groups:
        counts.update(group())
    return counts


def _provided() -> dict[str, int]:
    counts = {name: value - _cleared.get(name, 0) for name, value in _standing().items()}
    return {name: value for name, value in counts.items() if value}


def add_sample(name: str, value: float, unit: str = "seconds") -> None:
    """Adds one sample to a metric."""
    with _lock:
        metric = _metrics.get(name)
        if metric is None:
            metric = _metrics[name] = Metric(unit)
        metric.count += 1
        metric.total += value
        metric.samples.append((time.time(), value))


@contextmanager
def eager_operation() -> Iterator[None]:
    """A scope whose compiles and runs count as those of single operations."""
    _eager.on = True
    try:
        yield
    finally:
        _eager.on = False


def stage(name: str) -> str:
    """Name of the metric for a stage of the pipeline: eager operations have their own."""
    return f"EagerOp{name}" if getattr(_eager, "on", False) else name


class timed:
    """Adds a block's duration in seconds to a metric, also when it raises; gives its start."""

    __slots__ = ("_name", "_row", "_start")

    def __init__(self, name: str) -> None:
        self._name = name
        self._row = _capture.Row(name) if _capture.on else None

    def __enter__(self) -> float:
        if self._row is not None:
            self._row.__enter__()
        self._start = time.perf_counter()
        return self._start

    def __exit__(self, *error: Any) -> None:
        end = time.perf_counter()
        if self._row is not None:
            self._row.__exit__(*error)
        add_sample(self._name, end - self._start)
        _timeline.add(self._name, self._start, end)


def waited(start: float) -> None:
    """Says that the host waited for the device since `start`, as `time.perf_counter` gives it."""
    took = time.perf_counter() - start
    add_sample("DeviceLockWait", took)
    # What was started took longer than its start.
    with _lock:
        metric = _metrics.get("ExecuteTime")
        if metric is not None and metric.samples:
            when, value = metric.samples.pop()
            metric.samples.append((when, value + took))
            metric.total += took


def counter(name: str) -> int | None:
    """A counter's value, or None if nothing was ever counted under that name."""
    own = _counters.get(name)
    if name in _sources:
        return (own or 0) + _sources[name]() - _cleared.get(name, 0) or None
    return own if own is not None or "::" not in name else _provided().get(name)


def metric(name: str) -> Metric | None:
    """A metric, or None."""
    return _metrics.get(name) or _timed_elsewhere().get(name)


def counter_names() -> list[str]:
    """Names of all counters, sorted."""
    return sorted({*_counters, *_provided()})


def host_ops() -> list[str]:
    """Names of the counters of operators that ran on the host, and of reads, sorted."""
    return [name for name in counter_names() if "::" in name and not name.startswith("xla::")]


def metric_names() -> list[str]:
    """Names of all metrics, sorted."""
    return sorted({*_metrics, *_timed_elsewhere()})


def clear_counters() -> None:
    """Forgets all counters."""
    with _lock:
        _counters.clear()
        _cleared.update(_standing())


def clear_metrics() -> None:
    """Forgets all metrics."""
    global _forgotten_at
    with _lock:
        _metrics.clear()
        _forgotten_at = time.time()
        for source in _timings:
            _forgotten.update({name: (calls, seconds) for name, (calls, seconds, *_) in source().items()})
