"""The report as one page that needs nothing else, and as a trace for Perfetto."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from torch_xla import _files
from torch_xla._core.device.memory_stats import in_bytes
from torch_xla._errors import message
from torch_xla.debug._profile import words
from torch_xla.debug._profile.report import STAGES, Report, Segment

_HERE = Path(__file__).parent
# Of each row of the timeline the longest pieces are kept: browsers get slow with more.
_MOST = 20_000
_ROWS = 200
_MOST_CAUSES = 6

T = TypeVar("T")


def save(report: Report, path: str | os.PathLike[str]) -> None:
    """Writes the page and the trace; as `profile.save`."""
    page = Path(path)
    trace = page.with_suffix(".json")
    if page == trace:
        raise ValueError(
            message("profile", f"got {os.fspath(path)!r}", expected="the page's name", do="call it report.html")
        )
    texts = {page: html(report, trace.name), trace: json.dumps(chrome_trace(report), separators=(",", ":"))}
    try:
        with ExitStack() as stack:  # both take their places once both are whole
            for target, text in texts.items():
                Path(stack.enter_context(_files.replacing(target))).write_text(text, encoding="utf-8")
    except OSError as error:
        text = message(
            "profile",
            f"{os.fspath(path)!r} cannot be written ({error.strerror or error})",
            do="save it elsewhere; the report is kept",
        )
        raise type(error)(error.errno, text) from error


def html(report: Report, trace: str) -> str:
    """The page of a report; `trace` is the name of the trace file beside it."""
    busy, total = words.busy(report)
    return render(
        _HERE / "report.html",
        _data(report),
        report=report,
        trace=trace,
        when=time.strftime("%Y-%m-%d %H:%M", time.localtime(report.began)),
        script=(_HERE / "report.js").read_text(),
        findings=words.findings(report),
        busy=busy / total if total else 0.0,
        step=words.step_seconds(report),
        steps=sum(s.ended for s in report.steps),
        again=sum(c.again for c in report.compiles),
        compile_seconds=sum(c.lower + c.compile for c in report.compiles),
        causes=_causes(report),
        waits=_waits(report),
        stages=STAGES,
        rows=_ROWS,
    )


def render(template: Path, data: Any, **values: Any) -> str:
    """A page of this style, whose script finds `data`."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(seconds=words.seconds, size=in_bytes, short=words.short)
    return environment.get_template(template.name).render(
        style=(_HERE / "report.css").read_text(),
        drawing=(_HERE / "drawing.js").read_text(),
        # "<" would end the script element.
        data=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        **values,
    )


def _waits(report: Report) -> list[tuple[str, int, float, float, str, float]]:
    """(name, gaps, seconds, start of the longest, stage, its length) of what the devices waited for."""
    rows = []
    for name, count, seconds in report.waits():
        longest = max((gap for gap in report.gaps if gap.name == name), key=lambda gap: gap.seconds)
        shown = words.short(name) + words.mostly(report, name)
        rows.append((shown, count, seconds, longest.start, longest.stage, longest.seconds))
    return rows[:_ROWS]


def _causes(report: Report) -> list[tuple[str, float, list[tuple[str, str, float, float]]]]:
    """Bars of where the devices' time went: (title, seconds, parts of (name, stage, seconds, share))."""
    warm = words.warm(report)
    bars = []
    choices: list[tuple[str, Sequence[tuple[float, float]]]] = [("whole block", [(0.0, report.seconds)])]
    if warm and len(warm) < len(report.steps):
        choices.append(("steps that compiled nothing", [(s.start, s.end) for s in warm]))
    devices = max(len({run.device for run in report.runs}), 1)
    for title, spans in choices:
        length = sum(end - start for start, end in spans) * devices or 1.0
        waited = words.waits(report, spans)
        busy = max(length - sum(spent for _, _, spent in waited), 0.0)
        parts = [("busy", "execute", busy, busy / length)]
        parts += [(name, stage, spent, spent / length) for name, stage, spent in waited[:_MOST_CAUSES]]
        rest = sum(spent for _, _, spent in waited[_MOST_CAUSES:])
        if rest:
            parts.append(("other causes", "profile", rest, rest / length))
        bars.append((title, length, parts))
    return bars


class _Texts:
    """Texts by number, each once."""

    def __init__(self) -> None:
        self.all: dict[str | None, int] = {None: 0}

    def __call__(self, text: str | None) -> int:
        return self.all.setdefault(None if text is None else words.short(text), len(self.all))


def _data(report: Report) -> dict[str, Any]:
    """The data that the page's script draws; times in microseconds."""
    texts = _Texts()
    stages = {stage: i for i, stage in enumerate(STAGES)}

    def segments(items: Iterable[Segment]) -> list[list[Any]]:
        return [[_us(s.start), _us(s.seconds), stages[s.stage], texts(s.line), texts(s.why)] for s in _longest(items)]

    devices = sorted({run.device for run in report.runs})
    rows: dict[str, Any] = {
        "length": _us(report.seconds),
        "stages": STAGES,
        "host": segments(report.host),
        "others": [[name, segments(items)] for name, items in report.others.items()],
        "devices": [
            [
                device,
                [
                    [_us(r.start), _us(r.seconds), texts(r.key[:8]), texts(r.line)]
                    for r in _longest(run for run in report.runs if run.device == device)
                ],
                [
                    [_us(g.start), _us(g.seconds), stages[g.stage], texts(g.name), texts(g.line)]
                    for g in _longest(gap for gap in report.gaps if gap.device == device)
                ],
            ]
            for device in devices
        ],
        "calls": [[_us(c.start), _us(c.seconds), texts(c.name), c.depth] for c in _longest(report.calls)],
        "steps": [
            [
                _us(s.start),
                _us(s.seconds),
                [_us(s.stages.get(stage, 0.0)) for stage in STAGES],
                _us(s.execute),
                s.compiles,
                int(s.ended),
            ]
            for s in _longest(report.steps)
        ],
        "live": [[_us(when), nbytes] for when, nbytes in report.memory.live],
    }
    rows["texts"] = list(texts.all)
    return rows


def _longest(items: Iterable[T]) -> list[T]:
    rows: list[Any] = list(items)
    if len(rows) > _MOST:
        least = sorted((row.seconds for row in rows), reverse=True)[_MOST]
        rows = [row for row in rows if row.seconds > least]
    return rows


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def chrome_trace(report: Report) -> dict[str, Any]:
    """The timeline in the form that Perfetto and ``chrome://tracing`` open."""
    events: list[dict[str, Any]] = []
    names: list[dict[str, Any]] = [_name("process_name", 1, name=report.program)]
    rows = ["steps", "host", *(f"thread {name}" for name in report.others), "modules"]
    rows += [f"xla:{device}" for device in sorted({run.device for run in report.runs})]
    place = {name: number for number, name in enumerate(rows, 1)}  # thread 0 is the idle one to Perfetto
    for name, number in place.items():
        names += [_name("thread_name", number, name=name), _name("thread_sort_index", number, sort_index=number)]

    def put(row: str, name: str, start: float, seconds: float, **args: Any) -> None:
        # In whole nanoseconds from end to end, so that what is nested stays nested.
        begin, end = round(start * 1e9), round((start + seconds) * 1e9)
        event = {"ph": "X", "pid": 1, "tid": place[row], "name": name, "ts": begin / 1e3, "dur": (end - begin) / 1e3}
        events.append(event | {"args": {key: value for key, value in args.items() if value is not None}})

    for step in report.steps:
        put("steps", f"step {step.number}" if step.ended else "rest", step.start, step.seconds, compiles=step.compiles)
    for s in report.host:
        put("host", s.stage, s.start, s.seconds, line=s.line, why=s.why)
    for name, segments in report.others.items():
        for s in segments:
            put(f"thread {name}", s.stage, s.start, s.seconds)
    for call in report.calls:
        put("modules", call.name, call.start, call.seconds)
    for run in report.runs:
        put(f"xla:{run.device}", "execute", run.start, run.seconds, graph=run.key, line=run.line)
    for gap in report.gaps:
        put(f"xla:{gap.device}", f"idle: {gap.name}", gap.start, gap.seconds, line=gap.line)
    for when, nbytes in report.memory.live:
        counted = {"ph": "C", "pid": 1, "tid": 1, "name": "live tensors", "ts": round(when * 1e9) / 1e3}
        events.append(counted | {"args": {"bytes": nbytes}})
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return {"displayTimeUnit": "ms", "traceEvents": names + events}


def _name(kind: str, row: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": 1, "tid": row, "name": kind, "args": args}
