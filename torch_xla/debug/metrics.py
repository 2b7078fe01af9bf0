"""Counters and metrics, imported as ``met``: what was recorded, compiled, run and copied, and how long it took."""

from __future__ import annotations

from collections.abc import Iterable

from torch_xla import _config, _metrics

_SHORT_COUNTERS = (
    "CachedCompile",
    "PersistentCacheHit",
    "PersistentCacheMiss",
    "MarkStep",
    "DynamoSyncInputExecuteTime",
)
_SHORT_METRICS = (
    "CompileTime",
    "ExecuteTime",
    "ExecuteReplicatedTime",
    "TransferToDeviceTime",
    "TransferFromDeviceTime",
)

# Units of a duration, from large to small: seconds in one, digits before the point.
_TIME_UNITS = (("d", 86400.0, 2), ("h", 3600.0, 2), ("m", 60.0, 2), ("s", 1.0, 2), ("ms", 1e-3, 3))
_BYTE_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


def counter_names() -> list[str]:
    """Names of all counters that were ever counted since the last `clear_counters`."""
    return _metrics.counter_names()


def counter_value(name: str) -> int | None:
    """Value of a counter, or None if it was never counted."""
    return _metrics.counter(name)


def clear_counters() -> None:
    """Forgets all counters."""
    _metrics.clear_counters()


def metric_names() -> list[str]:
    """Names of all metrics that have samples since the last `clear_metrics`."""
    return _metrics.metric_names()


def metric_data(name: str) -> tuple[int, float, tuple[tuple[float, float], ...]] | None:
    """The samples of a metric.

    Args:
        name: Name of the metric.

    Returns:
        Number of samples ever taken, their sum, and the latest ones as (time in seconds since the epoch, value).
        Durations are in nanoseconds, sizes in bytes. None if there is no such metric.
    """
    metric = _metrics.metric(name)
    if metric is None:
        return None
    factor = 1e9 if metric.unit == "seconds" else 1.0
    return metric.count, metric.total * factor, tuple((when, value * factor) for when, value in list(metric.samples))


def clear_metrics() -> None:
    """Forgets all metrics."""
    _metrics.clear_metrics()


def clear_all() -> None:
    """Forgets all counters and metrics."""
    clear_metrics()
    clear_counters()


def metrics_report() -> str:
    """All metrics and counters as text."""
    return _report(metric_names(), counter_names())


def short_metrics_report(counter_names: list[str] | None = None, metric_names: list[str] | None = None) -> str:
    """Some metrics and counters as text, and the counters of operations that ran on the host.

    Args:
        counter_names: Names of counters; by default those that tell how often a step ran and was known already.
        metric_names: Names of metrics; by default the times of compiling, running and copying.
    """
    counters = list(counter_names or _SHORT_COUNTERS)
    counters += [name for name in executed_fallback_ops() if name not in counters]
    return _report(metric_names or _SHORT_METRICS, counters)


def executed_fallback_ops() -> list[str]:
    """Names of operations that ran on the host, ``aten::<name>``."""
    return _metrics.host_ops()


def _report(metrics: Iterable[str], counters: Iterable[str]) -> str:
    lines: list[str] = []
    for name in metrics:
        metric = _metrics.metric(name)
        if metric is not None:
            lines += _metric_lines(name, metric)
    for name in counters:
        value = _metrics.counter(name)
        if value is not None:
            lines += [f"Counter: {name}", f"  Value: {value}"]
    return "".join(f"{line}\n" for line in lines)


def _metric_lines(name: str, metric: _metrics.Metric) -> list[str]:
    show = _duration if metric.unit == "seconds" else _size if metric.unit == "bytes" else _number
    samples = list(metric.samples)
    lines = [f"Metric: {name}", f"  TotalSamples: {metric.count}", f"  Accumulator: {show(metric.total)}"]
    seconds = samples[-1][0] - samples[0][0] if samples else 0.0
    if seconds > 0:
        lines.append(f"  ValueRate: {show(metric.each * sum(value for _, value in samples) / seconds)} / second")
        lines.append(f"  Rate: {metric.each * len(samples) / seconds:g} / second")
    if samples:
        values = sorted(value for _, value in samples)
        parts = [
            f"{100 * fraction:g}%={show(values[int(fraction * len(values))])}"
            for fraction in _config.XLA_METRICS_PERCENTILES.get()
        ]
        lines.append(f"  Percentiles: {'; '.join(parts)}")
    return lines


def _duration(seconds: float) -> str:
    """For example ``01m02s003ms004.500us``; leading units that are zero are left out."""
    text = ""
    for unit, scale, width in _TIME_UNITS:
        count = int(seconds / scale)
        if count or text:
            text += f"{count:0{width}d}{unit}"
            seconds -= count * scale
    return f"{text}{max(seconds, 0.0) * 1e6:07.3f}us"


def _size(count: float) -> str:
    unit = 0
    while count >= 1024 and unit < len(_BYTE_UNITS) - 1:
        count /= 1024
        unit += 1
    return f"{count:.2f}{_BYTE_UNITS[unit]}"


def _number(value: float) -> str:
    return f"{value:.2f}"
