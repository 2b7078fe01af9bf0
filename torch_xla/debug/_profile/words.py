"""Formats times, sizes and lines, and writes the sentences that come first."""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from statistics import median

from torch_xla._core.device.memory_stats import in_bytes
from torch_xla.debug._profile.report import COMPILE, END, PROFILE, UNCOMPILED, Report, StepProfile


def seconds(value: float) -> str:
    """A duration with the unit that fits: ``1.25 s``, ``12.3 ms``, ``45 µs``, ``0.38 µs``."""
    if value >= 60:
        return f"{int(value // 60)} min {value % 60:.0f} s"
    if value >= 1:
        return f"{value:.2f} s"
    if value >= 1e-3:
        return f"{value * 1e3:.{2 if value < 1e-2 else 1 if value < 0.1 else 0}f} ms"
    return f"{value * 1e6:.{2 if 0 < value < 1e-5 else 0}f} µs"


def count(number: int, what: str) -> str:
    """A number of things: ``1 step``, ``2 steps``."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def short(text: str) -> str:
    """A text with the folders of the working directory left out."""
    return text.replace(os.getcwd() + os.sep, "")


def warm(report: Report) -> list[StepProfile]:
    """The steps that compiled nothing, no program of the package's own either."""
    return [s for s in report.steps if s.ended and not s.compiles and not s.stages.get(COMPILE)]


def usual(report: Report) -> list[StepProfile]:
    """The steps that compiled nothing; all where each compiled."""
    return warm(report) or list(report.steps)


def busy(report: Report) -> tuple[float, float]:
    """Busy and whole seconds of the usual steps."""
    return sum(s.execute for s in usual(report)), sum(s.seconds for s in usual(report))


def waits(report: Report, spans: Sequence[tuple[float, float]]) -> list[tuple[str, str, float]]:
    """The waits of the devices within spans of time, in order: (name, stage, seconds), the longest first."""
    starts, ends = [start for start, _ in spans], [end for _, end in spans]
    durations: dict[tuple[str, str], float] = {}
    for gap in report.gaps:
        first, last = bisect_right(ends, gap.start), bisect_left(starts, gap.end)
        inside = sum(min(gap.end, b) - max(gap.start, a) for a, b in spans[first:last])
        if inside:
            durations[gap.name, gap.stage] = durations.get((gap.name, gap.stage), 0.0) + inside
    return sorted(((*key, spent) for key, spent in durations.items()), key=lambda row: -row[2])


def mostly(report: Report, name: str) -> str:
    """The line where the host was in most of the gaps of a name, unless the name says it."""
    lines: dict[str, float] = {}
    for gap in report.gaps:
        if gap.name == name and gap.line is not None and gap.line not in name:
            lines[gap.line] = lines.get(gap.line, 0.0) + gap.seconds
    return f", mostly at {short(max(lines, key=lambda line: lines[line]))}" if lines else ""


def step_seconds(report: Report) -> float | None:
    """Median of the usual steps."""
    return median(s.seconds for s in usual(report)) if report.steps else None


def findings(report: Report) -> list[tuple[str, str]]:
    """The findings, most expensive first: (kind, sentence)."""
    entries: list[tuple[float, str, str]] = []
    total = report.seconds or 1.0
    again = [c for c in report.compiles if c.again]
    if again:
        spent = sum(c.lower + c.compile for c in again)
        reasons = dict.fromkeys(short(c.reason) for c in again)
        more = f", and {count(len(reasons) - 1, 'other reason')}" if len(reasons) > 1 else ""
        text = f"{count(len(again), 'graph')} compiled again, {seconds(spent)}: {next(iter(reasons))}{more}"
        entries.append((spent, "compile", text))
    uncompiled: dict[str | None, list[float]] = {}
    for run in report.runs:
        if run.key == UNCOMPILED:
            uncompiled.setdefault(run.line, []).append(run.seconds)
    for line, runs in uncompiled.items():
        text = f"{count(len(runs), 'new graph')} ran operator by operator at {short(line or 'an unknown line')}"
        entries.append((sum(runs), "operators", f"{text}, {seconds(sum(runs))}"))
    steps = usual(report)
    devices = max(len({run.device for run in report.runs}), 1)
    length = sum(s.seconds for s in steps) * devices or 1.0
    for name, stage, spent in waits(report, [(s.start, s.end) for s in steps]):
        if spent > 0.05 * length and stage not in (COMPILE, PROFILE) and name != END:
            share = f"{spent / length:.0%} of the steps that compiled nothing, {seconds(spent)}"
            entries.append((spent, "gap", f"the device waited for {short(name)}{mostly(report, name)}: {share}"))
    for fallback in report.fallbacks:
        waited = f", its inputs were waited for {seconds(fallback.seconds)}" if fallback.seconds else ""
        often = "once" if fallback.count == 1 else f"{fallback.count} times"
        text = f"{fallback.op} ran on the host {often} at {short(fallback.line or 'an unknown line')}{waited}"
        entries.append((fallback.seconds, "fallback", text))
    for read in report.reads:
        # A value read once per step after the barrier is how losses are shown; it still stops the host.
        text = f"{count(read.count, 'value')} read at {short(read.line or 'an unknown line')}, {seconds(read.seconds)}"
        if read.divided:
            text += f"; small parts of {count(read.divided, 'graph')} were computed on the host"
        entries.append((read.seconds, "read", text))
    growing = [g for g in report.memory.growth if g.growing]
    if growing:
        kinds = [
            f"{g.after - g.before} {g.kind} ({in_bytes(g.nbytes)}) made at {short(g.line or 'an unknown line')}"
            for g in growing
        ]
        more = f" and {count(len(kinds) - 3, 'other kind')}" if len(kinds) > 3 else ""
        entries.append((0.0, "memory", f"more tensors are kept with every step: {'; '.join(kinds[:3])}{more}"))
    if report.looked_up:
        text = f"{report.loaded} of {count(report.looked_up, 'new graph')} came from the persistent cache"
        entries.append((0.0, "cache", text))
    if report.dropped:
        entries.append(
            (total, "profile", f"{report.dropped:,} events came after the profile was full and are left out")
        )
    return [(kind, text) for _, kind, text in sorted(entries, key=lambda row: -row[0])]
