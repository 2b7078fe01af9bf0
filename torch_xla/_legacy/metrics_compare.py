"""Compares metrics reports: reads them into numbers, and says which of a run left the range of earlier runs.

Example::

    history = get_data_points_from_metrics_reports([open(path).read() for path in earlier])
    print(compare_metrics(history, torch_xla.debug.metrics.metrics_report()))
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_DURATION = re.compile(
    r"(?:(?P<d>\d+)d)?(?:(?P<h>\d+)h)?(?:(?P<m>\d+)m(?!s))?(?:(?P<s>\d+)s)?(?:(?P<ms>\d+)ms)?(?:(?P<us>[\d.]+)us)?"
)
_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_SIZE = re.compile(r"([\d.]+)(PB|TB|GB|MB|KB|B)")
_MEGABYTES = {"PB": 1e9, "TB": 1e6, "GB": 1e3, "MB": 1.0, "KB": 1e-3, "B": 1e-6}
_LINE = re.compile(r"\s*(Metric|TotalSamples|Accumulator|Percentiles|Counter|Value): (.+?)\s*$")
_BASE = "v <= v_mean + (v_stddev * 2.0)"

DataPoints = dict[str, list[Any]]


def parse_metrics_report(report: str, dehumanize: bool = True) -> dict[str, Any]:
    """Reads a report into numbers.

    Args:
        report: What `torch_xla.debug.metrics.metrics_report` gave; other lines are skipped.
        dehumanize: Whether a value is its number alone, or the pair of the number and its text.

    Returns:
        Numbers by name and part: ``CompileTime__TotalSamples``, ``CompileTime__Accumulator_sec``,
        ``InboundData__Percentile_50_mb``, ``MarkStep__Value``. Durations are in seconds, sizes in megabytes.

    Raises:
        ValueError: A value is no number, duration or size.
    """
    metric_values: dict[str, Any] = {}
    metric = counter = None
    for line in report.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        part, text = match.groups()
        if part == "Metric":
            metric, counter = text, None
        elif part == "Counter":
            metric, counter = None, text
        elif part == "Value" and counter is not None:
            metric_values[f"{counter}__Value"] = int(text)
        elif metric is not None and part != "Value":
            for name, shown in _values(part, text):
                number, unit = _number(shown)
                metric_values[f"{metric}__{name}{unit and '_' + unit}"] = number if dehumanize else (number, shown)
    return metric_values


def _values(part: str, text: str) -> Iterable[tuple[str, str]]:
    if part != "Percentiles":
        return [(part, text)]
    return [(f"Percentile_{percent}", value) for percent, value in re.findall(r"([\d.]+)%=([^;\s]+)", text)]


def _number(text: str) -> tuple[float, str]:
    """A shown value and its unit: none, ``"sec"`` or ``"mb"``."""
    try:
        return float(text), ""
    except ValueError:
        pass
    duration = _DURATION.fullmatch(text)
    if duration is not None and any(duration.groups()):
        return sum(float(amount or 0) * _SECONDS[unit] for unit, amount in duration.groupdict().items()), "sec"
    size = _SIZE.fullmatch(text)
    if size is not None:
        return float(size[1]) * _MEGABYTES[size[2]], "mb"
    raise ValueError(f"[metrics] got value {text!r}, expected a number, a duration as 01m02s003ms, or a size as 1.50MB")


def get_data_points_from_metrics_reports(metrics_reports: Sequence[str]) -> DataPoints:
    """Reads several reports.

    Args:
        metrics_reports: The reports, oldest first.

    Returns:
        By name and part, one number per report; None where a report lacks it.
    """
    parsed = [parse_metrics_report(report) for report in metrics_reports]
    names = dict.fromkeys(name for report in parsed for name in report)
    return {name: [report.get(name) for report in parsed] for name in names}


def compare_metrics(
    data_points: Mapping[str, Sequence[Any]], metrics_report: str, config: Mapping[str, str] | None = None
) -> str:
    """Says what of a report leaves the range of earlier ones.

    Args:
        data_points: What `get_data_points_from_metrics_reports` gave for those.
        metrics_report: The report to look at.
        config: Python expressions of ``v``, the value, and ``v_mean`` and ``v_stddev``, those of the earlier ones; true
            where all is well. ``base_expression`` is for all names, ``<name>_expression`` for one. They are evaluated,
            so take them from no one you do not trust.

    Returns:
        A line for each value whose expression is false, and for each operator that now runs on the host.
    """
    import numpy as np

    config = {"base_expression": _BASE} if config is None else config
    lines = []
    for name, value in sorted(parse_metrics_report(metrics_report).items()):
        earlier = [point for point in data_points.get(name, ()) if point is not None]
        if not earlier:
            if name.startswith("aten::"):
                lines.append(f"Found new aten counter: {name}: {value}\n")
            continue
        expression = config.get(f"{name}_expression") or config["base_expression"]
        mean, deviation = float(np.mean(earlier)), float(np.std(earlier))
        if not eval(expression, {}, {"v": value, "v_mean": mean, "v_stddev": deviation}):
            lines.append(
                f"{name} failed its expression check. Expression: {expression}.  Mean: {mean}.  "
                f"Stddev: {deviation}.  Actual Value: {value}\n"
            )
    return "".join(lines)
