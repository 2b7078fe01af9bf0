"""The report as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO
from typing import Any

from torch_xla._core.device.memory_stats import in_bytes
from torch_xla._errors import message
from torch_xla.debug._profile import words
from torch_xla.debug._profile.report import STAGES, Report, Share, StepProfile

_STEPS = 12
_ROWS = 10
_NARROWEST = 118


def text(report: Report, width: int | None = None) -> str:
    """The report as text; as `profile.table`."""
    try:
        from rich.console import Console
    except ImportError as error:
        raise ImportError(
            message("profile", "rich is not installed", do="pip install 'torch_xla[profile]'; save() works without it")
        ) from error
    out = StringIO()
    console = Console(file=out, width=width or max(Console().width, _NARROWEST))
    for part in _parts(report):
        if getattr(part, "row_count", 1):
            console.print(part)
    return out.getvalue()


def _parts(report: Report) -> Iterable[Any]:
    from rich.markup import escape

    yield escape(f"{report.program} on {report.hardware}: {summary(report)}")
    for _, sentence in words.findings(report):
        yield escape(f"  - {sentence}")
    stages = [stage for stage in STAGES if any(step.stages.get(stage) for step in report.steps)]
    rows = [_step(str(s.number) if s.ended else "rest", s, stages) for s in _chosen(report.steps)]
    ended = [s for s in report.steps if s.ended]
    rows.append(_step(f"all {len(ended)}", _sum(report.steps), stages))
    yield _table("host by step, and device, in ms", ["step", *stages, "sum", "| execute", "idle", "compiles"], rows)
    waits = [
        [words.short(name) + words.mostly(report, name), str(n), words.seconds(t)]
        for name, n, t in report.waits()[:_ROWS]
    ]
    yield _table("what the device waited for", ["the host's part", "gaps", "time"], waits)
    compiles = [
        [
            words.seconds(c.start),
            words.seconds(c.lower + c.compile),
            f"{c.operators}, {words.count(len(c.loops), 'loop')}" if c.loops else str(c.operators),
            words.short(c.line or ""),
            words.short(c.reason),
        ]
        for c in report.compiles[:_ROWS]
    ]
    title = f"compiles, {len(report.compiles)}" + (f", the first {_ROWS}" if len(report.compiles) > _ROWS else "")
    yield _table(title, ["at", "took", "operators", "asked at", "reason"], compiles)
    for title, shares in (("host by line, in ms", report.lines), ("host by module, in ms", report.modules)):
        used = [stage for stage in STAGES if any(share.stages.get(stage) for share in shares[:_ROWS])]
        calls = ["calls"] if any(share.calls for share in shares) else []
        head = [title.split()[2].strip(","), *used, "sum", *calls]
        yield _table(title, head, [_share(share, used, bool(calls)) for share in shares[:_ROWS]])
    programs = [
        [p.key[:8], words.short(p.line or ""), str(p.runs), words.seconds(p.seconds), in_bytes(p.peak)]
        for p in report.programs[:_ROWS]
    ]
    yield _table("programs", ["key", "asked at", "runs", "device", "peak memory"], programs)


def summary(report: Report) -> str:
    """Length, steps and the device's share of them in a sentence."""
    step = words.step_seconds(report)
    ended = sum(s.ended for s in report.steps)
    busy, total = words.busy(report)
    parts = [words.seconds(report.seconds), words.count(ended, "step")]
    if step is not None and ended:
        parts.append(f"{words.seconds(step)} each, the device busy for {busy / total if total else 0:.0%} of it")
    return ", ".join([*parts, words.count(len(report.compiles), "compile")])


def _chosen(steps: Sequence[StepProfile]) -> list[StepProfile]:
    """All steps, or of many the first ones, those that compiled, the slowest and the last."""
    if len(steps) <= _STEPS:
        return list(steps)
    numbers = {s.number for s in [*steps[:2], steps[-1]]}
    rest = sorted(steps, key=lambda s: (-s.compiles, -s.seconds))
    numbers |= {s.number for s in rest[: _STEPS - len(numbers)]}
    return [s for s in steps if s.number in numbers]


def _sum(steps: Sequence[StepProfile]) -> StepProfile:
    stages = {stage: sum(s.stages.get(stage, 0.0) for s in steps) for stage in STAGES}
    return StepProfile(
        len(steps),
        0.0,
        sum(s.seconds for s in steps),
        stages,
        sum(s.execute for s in steps),
        sum(s.idle for s in steps),
        sum(s.compiles for s in steps),
    )


def _step(name: str, step: StepProfile, stages: Sequence[str]) -> list[str]:
    times = [*(step.stages.get(stage, 0.0) for stage in stages), step.seconds, step.execute, step.idle]
    return [name, *map(_cell, times), str(step.compiles or "")]


def _share(share: Share, stages: Sequence[str], calls: bool) -> list[str]:
    cells = [words.short(share.name), *(_cell(share.stages.get(stage, 0.0)) for stage in stages), _cell(share.seconds)]
    return [*cells, str(share.calls)] if calls else cells


def _cell(value: float) -> str:
    """Milliseconds in three digits, so that the columns of a step fit."""
    value *= 1e3
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}" if value else ""


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for i, name in enumerate(head):
        words_in = name in ("the host's part", "asked at", "reason", "line", "module", "key")
        table.add_column(name, justify="left" if words_in or not i else "right", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
