"""Accounting: from spans, marks, samples and finished programs to a `Report`.

The host's thread is cut into segments, each in the innermost span that covers it. Everything else - steps, modules,
lines, gaps - is an intersection of these segments with other intervals.
"""

from __future__ import annotations

import os
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeVar

from torch_xla._core.device import client, memory_stats
from torch_xla._core.report import debug_level
from torch_xla.debug._profile import report as data
from torch_xla.debug._profile.collect import Collector, Mark, Span
from torch_xla.debug._profile.report import Report, Run, Segment

_STAGE_OF = {
    "cut": data.CUT,
    "look up": data.LOOK_UP,
    "LoweringTime": data.LOWER,
    "CompileTime": data.COMPILE,
    "packing": data.COMPILE,
    "ExecuteTime": data.START,
    "barrier": data.START,
    "TransferToDeviceTime": data.TRANSFER,
    "TensorToData": data.TRANSFER,
    "TransferFromDeviceTime": data.TRANSFER,
    "read": data.TRANSFER,
    "operators": data.OPERATORS,
    "wait": data.WAIT,
    "loader": data.LOADER,
    "profile": data.PROFILE,
}
# Stages that are one cause of a gap.
_JOINED = {data.COMPILE: (data.COMPILE, data.LOWER), data.START: (data.START, data.CUT, data.LOOK_UP)}
_READ = "a value was read"
_BETWEEN = "between two programs"
# A thread that waits is told late: it must be scheduled, and get the interpreter's lock.
_LATE = 1e-3
# Shorter pauses of a device are its own.
_SHORTEST_GAP = 2e-5


class _Interval(Protocol):
    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...


I = TypeVar("I", bound=_Interval)  # noqa: E741
J = TypeVar("J", bound=_Interval)


class _Piece(NamedTuple):
    start: float
    end: float
    value: Any


def stage_of(span: str) -> str:
    """The stage that a span belongs to; eager operations have metrics of their own."""
    return _STAGE_OF.get(span.removeprefix("EagerOp"), data.RECORD)


def innermost(spans: Iterable[Span]) -> Iterator[tuple[float, float, list[Span]]]:
    """Cuts nested spans into pieces: (start, end, the spans that cover it, outermost first)."""
    stack: list[Span] = []
    at = 0.0
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        while stack and stack[-1].end <= span.start:
            if stack[-1].end > at:
                yield at, stack[-1].end, list(stack)
                at = stack[-1].end
            stack.pop()
        if stack and span.start > at:
            yield at, span.start, list(stack)
        at = max(at, span.start) if stack else span.start
        stack.append(span)
    while stack:
        if stack[-1].end > at:
            yield at, stack[-1].end, list(stack)
            at = stack[-1].end
        stack.pop()


def overlaps(left: Sequence[I], right: Sequence[J]) -> Iterator[tuple[I, J, float]]:
    """Pairs of intervals that overlap, with how much; both sides in order and without overlaps of their own."""
    j = 0
    for one in left:
        while j < len(right) and right[j].end <= one.start:
            j += 1
        k = j
        while k < len(right) and right[k].start < one.end:
            both = min(one.end, right[k].end) - max(one.start, right[k].start)
            if both > 0:
                yield one, right[k], both
            k += 1


def report(collected: Collector) -> Report:
    """Accounts for what was collected."""
    return _Account(collected).report()


class _Account:
    def __init__(self, collected: Collector) -> None:
        self.collected = collected
        self.zero = collected.start
        spans = [s for s in collected.spans if s.end > collected.start]
        # What PyTorch's own threads do, the profiled thread waits for.
        self.main = [s for s in spans if self._is_main(s.thread) and s.stage != "module"]
        self.modules = [s for s in spans if s.stage == "module"]
        self.aside = [s for s in spans if not self._is_main(s.thread)]
        self.asks = sorted((s for s in self.main if s.stage in ("barrier", "read")), key=lambda s: s.start)
        self.ask_starts = [s.start for s in self.asks]
        self.runs = self._runs()
        self.why = {id(s): self._why(s) for s in self.asks}
        self.host = self._host()
        self.stood: dict[tuple[str | None, str | None], float] = {}
        for segment in self.host:
            if segment.stage not in _JOINED[data.COMPILE]:
                key = segment.line, segment.why
                self.stood[key] = self.stood.get(key, 0.0) + segment.seconds

    def _is_main(self, thread: int) -> bool:
        return thread == self.collected.owner or self.collected.names.get(thread) == ""

    def report(self) -> Report:
        steps = self._steps()
        began = self.collected
        looked_up = [mark.detail[0] for mark in began.marks if mark.kind == "persistent cache"]
        return Report(
            program=os.path.basename(sys.argv[0]) or "python",
            began=began.began,
            seconds=began.end - self.zero,
            hardware=self._hardware(),
            steps=steps,
            host=tuple(self.host),
            others=self._others(),
            runs=tuple(self.runs),
            gaps=self._gaps(),
            compiles=self._compiles(),
            fallbacks=self._fallbacks(),
            reads=self._reads(),
            modules=self._modules(),
            lines=self._lines(),
            calls=tuple(
                data.ModuleCall(s.detail[0], s.start - self.zero, s.end - s.start, s.detail[1])
                for s in sorted(self.modules, key=lambda s: s.start)
            ),
            programs=self._programs(),
            memory=self._memory(),
            looked_up=len(looked_up),
            loaded=sum(looked_up),
            dropped=began.dropped,
        )

    def _hardware(self) -> str:
        if not client.client_started():
            return client.device_type()
        used = sorted({run.device for run in self.runs}) or [0]
        return f"{len(used)} × {client.jax_device(used[0]).device_kind}"

    # The host's thread

    def _ask_at(self, time: float, thread: int) -> Span | None:
        """The barrier or read of a thread that was running at a moment."""
        at = bisect_right(self.ask_starts, time)
        return next((s for s in reversed(self.asks[max(at - 8, 0) : at]) if s.thread == thread and time <= s.end), None)

    def _why(self, span: Span) -> tuple[str | None, str]:
        """(line, what asked for it) of a barrier or a read."""
        if span.stage == "barrier":
            return span.detail[1], span.detail[0]
        mark = self._fallback_of(span)
        return span.detail, _on_host(mark.detail[0]) if mark is not None else _READ

    def _fallback_of(self, read: Span) -> Mark | None:
        """The operator on the host that a value was read for: the last one noted, if at the same line."""
        at = bisect_right(self.collected.marks, read.start, key=lambda m: m.time)
        for mark in reversed(self.collected.marks[max(at - 4, 0) : at]):
            if mark.kind == "fallback" and mark.thread == read.thread and mark.detail[1].startswith(_BETWEEN):
                return mark if mark.detail[2] == read.detail else None
        return None

    def _host(self) -> list[Segment]:
        busy = sorted((run.start + self.zero, run.end + self.zero) for run in self.runs)
        starts = [start for start, _ in busy]
        segments: list[Segment] = []
        at = self.zero

        def put(stage: str, start: float, end: float, line: str | None, why: str | None) -> None:
            nonlocal at
            start = max(start, at)
            if end <= start:
                return
            last = segments[-1] if segments else None
            if start > at:
                segments.append(Segment(data.RECORD, at - self.zero, start - at))
                last = None
            if last is not None and (last.stage, last.line, last.why) == (stage, line, why):
                segments[-1] = Segment(stage, last.start, end - self.zero - last.start, line, why)
            else:
                segments.append(Segment(stage, start - self.zero, end - start, line, why))
            at = end

        for start, end, cover in innermost(self.main):
            stage = stage_of(cover[-1].stage)
            ask = next((s for s in cover if s.stage in ("barrier", "read")), None)
            line, why = self.why[id(ask)] if ask is not None else (None, None)
            if cover[-1].stage == "wait" and line is None:
                line = cover[-1].detail
            if cover[-1].stage == "read" or cover[-1].stage.endswith("TransferFromDeviceTime"):
                # Reading begins with waiting for the program that computes the value.
                before = busy[max(bisect_right(starts, start) - 4, 0) : bisect_right(starts, start)]
                ready = min(max((start, *(e for _, e in before))), end)
                put(data.WAIT, start, ready, line, why)
                start = ready
            put(stage, start, min(end, self.collected.end), line, why)
        if self.collected.end > at:
            put(data.RECORD, at, self.collected.end, None, None)
        return segments

    # Devices

    def _runs(self) -> list[Run]:
        runs = []
        free: dict[int, float] = {}
        starting = {s.start: s.end for s in self.main if s.stage.endswith("ExecuteTime")}
        packing = [s for s in self.main if s.stage == "packing"]
        drains = sorted((s.start, s.end) for s in self.main if s.stage == "wait" and s.detail is not None)
        for done in sorted(self.collected.finished, key=lambda f: f.launch.start):
            began, over = done.launch.start, starting.get(done.launch.start, 0.0)
            # Not before what gathers its inputs was compiled.
            began = max((s.end for s in packing if began <= s.start and s.end <= over), default=began)
            start = max(began, free.get(done.launch.device, 0.0))
            # The thread that waits for it is told late; the host may have had its results before.
            ask = self._ask_at(done.launch.start, done.thread)
            ends = [done.end, ask.end] if ask is not None and ask.stage == "read" else [done.end]
            at = bisect_right(drains, (done.launch.start, 0.0))
            ends += [over for _, over in drains[at : at + 1]]
            end = max(min(ends), start)
            free[done.launch.device] = end
            line = None if ask is None else ask.detail[1] if ask.stage == "barrier" else ask.detail
            runs.append(Run(done.launch.device, start - self.zero, end - start, done.launch.key, line))
        for s in self.main:
            if s.stage == data.OPERATORS:
                device, line = s.detail
                runs.append(Run(device, s.start - self.zero, s.end - s.start, data.UNCOMPILED, line))
        return sorted(runs, key=lambda run: run.start)

    def _steps(self) -> tuple[data.StepProfile, ...]:
        length = self.collected.end - self.zero
        barriers = [s for s in self.asks if s.stage == "barrier"]
        traced = [s for s in barriers if s.detail[0] == debug_level.STEP_TRACE]
        launches = sorted(f.launch.start for f in self.collected.finished)
        launches = sorted([*launches, *(s.start for s in self.main if s.stage == data.OPERATORS)])
        edges = [0.0]
        for barrier in traced or barriers:
            # A barrier with nothing to do ends no step.
            if bisect_right(launches, barrier.end) > bisect_right(launches, edges[-1] + self.zero):
                edges.append(barrier.end - self.zero)
        ended = len(edges) - 1
        if length - edges[-1] > 0:
            edges.append(length)
        pieces = [_Piece(a, b, i) for i, (a, b) in enumerate(zip(edges, edges[1:], strict=False))]
        stages: list[dict[str, float]] = [{} for _ in pieces]
        for piece, segment, both in overlaps(pieces, self.host):
            stages[piece.value][segment.stage] = stages[piece.value].get(segment.stage, 0.0) + both
        devices = sorted({run.device for run in self.runs})
        busy = [0.0] * len(pieces)
        for device in devices:
            for piece, _, both in overlaps(pieces, [run for run in self.runs if run.device == device]):
                busy[piece.value] += both / len(devices)
        compiles = Counter(
            bisect_right(edges, mark.time - self.zero) - 1 for mark in self.collected.marks if mark.kind == "compile"
        )
        return tuple(
            data.StepProfile(i, a, b - a, stages[i], busy[i], max(b - a - busy[i], 0.0), compiles[i], i < ended)
            for a, b, i in pieces
        )

    def _gaps(self) -> tuple[data.Gap, ...]:
        gaps: list[data.Gap] = []
        samples = self._territories()
        for device in sorted({run.device for run in self.runs}):
            at = 0.0
            holes: list[_Piece] = []
            for run in [r for r in self.runs if r.device == device]:
                if run.start - at > _SHORTEST_GAP:
                    holes.append(_Piece(at, run.start, len(holes)))
                at = run.end
            length = self.collected.end - self.zero
            if length - at > _SHORTEST_GAP:
                holes.append(_Piece(at, length, len(holes)))
            during: list[dict[tuple[str, str | None, str | None], float]] = [{} for _ in holes]
            for hole, segment, both in overlaps(holes, self.host):
                key = (segment.stage, segment.line, segment.why)
                during[hole.value][key] = during[hole.value].get(key, 0.0) + both
            lines: list[dict[tuple[str | None, bool], float]] = [{} for _ in holes]
            for hole, sample, both in overlaps(holes, samples):
                lines[hole.value][sample.value] = lines[hole.value].get(sample.value, 0.0) + both
            for hole in holes:
                last = hole.value == len(holes) - 1 and hole.end == length
                gaps.append(self._gap(device, hole, during[hole.value], lines[hole.value], last))
        return tuple(sorted(gaps, key=lambda gap: gap.start))

    def _gap(
        self,
        device: int,
        hole: _Piece,
        during: dict[tuple[str, str | None, str | None], float],
        lines: dict[tuple[str | None, bool], float],
        last: bool,
    ) -> data.Gap:
        by_stage: Counter[str] = Counter()
        for (stage, _, _), seconds in during.items():
            by_stage[stage] += seconds  # type: ignore[assignment]
        for joined, parts in _JOINED.items():
            by_stage[joined] = sum(by_stage.pop(part, 0) for part in parts)
        stage = max(by_stage, key=lambda s: by_stage[s])
        sampled = max(lines, key=lambda s: lines[s], default=(None, False))
        here = {k: v for k, v in during.items() if k[0] in _JOINED.get(stage, (stage,))}
        _, line, why = max(here, key=lambda k: here[k], default=(stage, None, None))
        if (
            stage == data.RECORD
            and sum(v for (_, loading), v in lines.items() if loading) > hole.end / 2 - hole.start / 2
        ):
            stage = data.LOADER
        at = f" at {line}" if line else ""
        line = line or (sampled[0] if not last else None)
        if stage == data.RECORD:
            name = data.END if last else "recording" + self._after(hole.start)
        elif stage == data.LOADER:
            name = "the data loader"
        elif stage == data.COMPILE:
            name = f"compiling a graph{at}"
        elif stage == data.START:
            name = f"the barrier{at}" if why != _READ else f"a value read{at}"
        elif stage in (data.TRANSFER, data.WAIT):
            if why is None:
                name = "copying to the device" if stage == data.TRANSFER else "waiting for the devices"
            elif why == _READ:
                name = f"a value read{at}"
            else:
                name = f"{why.replace(' ran ', ', which ran ')}{at}" if "::" in why else f"the barrier{at}"
        else:
            name = "counting live tensors for this report"
        return data.Gap(device, hole.start, hole.end - hole.start, stage, name, line)

    def _after(self, time: float) -> str:
        """Why the host was not ahead when a device ran out of work: it had just waited for that device."""
        at = bisect_right(self.ask_starts, time + self.zero)
        for span in reversed(self.asks[max(at - 3, 0) : at]):
            if span.end >= time + self.zero - _LATE and span.stage == "read":
                line, why = self.why[id(span)]
                cause = "a value was read" if why == _READ else why
                return f" after {cause} at {line or 'an unknown line'}"
        return ""

    # Modules and lines

    def _modules(self) -> tuple[data.Share, ...]:
        pieces = [_Piece(a - self.zero, b - self.zero, cover[-1].detail[0]) for a, b, cover in innermost(self.modules)]
        total: Counter[str] = Counter()
        calls: Counter[str] = Counter()
        for span in self.modules:
            total[span.detail[0]] += span.end - span.start  # type: ignore[assignment]
            calls[span.detail[0]] += 1
        return _shares(((p.value, s.stage, both) for p, s, both in overlaps(pieces, self.host)), total, calls)

    def _territories(self) -> list[_Piece]:
        """Every sample with the time that is nearer to it than to the others."""
        samples = self.collected.samples
        edges = [self.zero]
        edges += [(a.time + b.time) / 2 for a, b in zip(samples, samples[1:], strict=False)]
        edges.append(self.collected.end)
        return [
            _Piece(a - self.zero, b - self.zero, (s.line, s.loading))
            for a, b, s in zip(edges, edges[1:], samples, strict=False)
        ]

    def _lines(self) -> tuple[data.Share, ...]:
        pieces = [_Piece(s.start, s.end, (s.line, s.stage)) for s in self.host if s.line]
        rest = [s for s in self.host if not s.line and s.stage != data.PROFILE]
        shares: list[tuple[str, str, float]] = [(p.value[0], p.value[1], p.end - p.start) for p in pieces]
        for segment, sample, both in overlaps(rest, self._territories()):
            loading = sample.value[1] and segment.stage == data.RECORD
            line = sample.value[0] or "not in the user's code"
            shares.append((line, data.LOADER if loading else segment.stage, both))
        return _shares(shares, None, Counter())

    # Tables

    def _compiles(self) -> tuple[data.Compile, ...]:
        compiles = []
        stages = [s for s in self.main if s.stage.endswith(("LoweringTime", "CompileTime"))]
        for mark in (m for m in self.collected.marks if m.kind == "compile"):
            key, operators, line, name, retrace, count, loops = mark.detail
            mine = [s for s in stages if s.thread == mark.thread]
            at = bisect_right(mine, mark.time, key=lambda s: s.end)
            lowered = next((s for s in reversed(mine[:at]) if s.stage.endswith("LoweringTime")), None)
            compiled = next((s for s in mine[at:] if s.stage.endswith("CompileTime")), None)
            ask = self._ask_at(mark.time, mark.thread)
            reason = "the first graph of this line" if count == 0 else "unlike the graphs known from this line"
            compiles.append(
                data.Compile(
                    start=(lowered.start if lowered else mark.time) - self.zero,
                    lower=lowered.end - lowered.start if lowered else 0.0,
                    compile=compiled.end - compiled.start if compiled else 0.0,
                    key=key,
                    name=name,
                    operators=operators,
                    line=line,
                    cause=self.why[id(ask)][1] if ask is not None else "not a barrier",
                    again=retrace is not None,
                    reason=retrace.reason if retrace is not None else reason,
                    differences=tuple(map(str, retrace.differences)) if retrace is not None else (),
                    loops=loops,
                )
            )
        return tuple(compiles)

    def _stood(self, line: str | None, why: str) -> float:
        """The seconds that the host stood at a line for a reason, without compiling."""
        return self.stood.get((line, why), 0.0)

    def _fallbacks(self) -> tuple[data.Fallback, ...]:
        counts = Counter(mark.detail for mark in self.collected.marks if mark.kind == "fallback")
        rows = [
            data.Fallback(op, how, line, count, self._stood(line, _on_host(op)) if how.startswith(_BETWEEN) else 0.0)
            for (op, how, line), count in counts.items()
        ]
        return tuple(sorted(rows, key=lambda row: (-row.seconds, -row.count)))

    def _reads(self) -> tuple[data.Read, ...]:
        counts = Counter(s.detail for s in self.asks if s.stage == "read" and self.why[id(s)][1] == _READ)
        divided = Counter(mark.detail[0] for mark in self.collected.marks if mark.kind == "host parts")
        rows = [data.Read(line, count, self._stood(line, _READ), divided[line]) for line, count in counts.items()]
        return tuple(sorted(rows, key=lambda row: -row.seconds))

    def _programs(self) -> tuple[data.ProgramProfile, ...]:
        names = {m.detail[0]: m.detail[3] for m in self.collected.marks if m.kind == "compile"}
        runs = Counter(run.key for run in self.runs)
        seconds: Counter[str] = Counter()
        for run in self.runs:
            seconds[run.key] += run.seconds  # type: ignore[assignment]
        lines = {run.key: run.line for run in reversed(self.runs)}
        programs = []
        for key, loaded in self.collected.stats.items():
            stats = memory_stats.compiled_stats(loaded)
            if stats is None:
                continue
            results = max(stats.output_size_in_bytes - stats.alias_size_in_bytes, 0)
            arguments, temporary = stats.argument_size_in_bytes, stats.temp_size_in_bytes
            line, took = lines.get(key), float(seconds[key])
            peak = arguments + results + temporary
            programs.append(
                data.ProgramProfile(key, names.get(key), line, runs[key], took, arguments, results, temporary, peak)
            )
        return tuple(sorted(programs, key=lambda program: -program.peak))

    def _memory(self) -> data.Memory:
        counts = self.collected.counts
        live = tuple(
            (when - self.zero, sum(memory_stats.size_of(key[1], key[2]) * count for key, count in now.items()))
            for when, now in counts
        )
        first, last = counts[0][1], counts[-1][1]
        grown = []
        for key, after in last.items():
            before = first.get(key, 0)
            if after > before:
                line, shape, dtype = key
                history = [now.get(key, 0) for _, now in counts]
                rises = sum(now > then for then, now in pairwise(history))
                growing = len(counts) > 4 and 2 * rises >= len(history) - 1
                size = (after - before) * memory_stats.size_of(shape, dtype)
                grown.append(data.Growth(memory_stats.kind_of(shape, dtype), line, before, after, size, growing))
        return data.Memory(live, tuple(sorted(grown, key=lambda g: (not g.growing, -g.nbytes))))

    def _others(self) -> dict[str, tuple[Segment, ...]]:
        thread_segments = {}
        for thread in dict.fromkeys(s.thread for s in self.aside):
            mine = [s for s in self.aside if s.thread == thread and s.stage != "module"]
            name = self.collected.names[thread].removeprefix("torch_xla-")
            while name in thread_segments:
                name += "'"
            thread_segments[name] = tuple(
                Segment(stage_of(cover[-1].stage), start - self.zero, end - start)
                for start, end, cover in innermost(mine)
            )
        return thread_segments


def _on_host(op: str) -> str:
    return f"{op} ran on the host"


def _shares(
    parts: Iterable[tuple[str, str, float]], total: Counter[str] | None, calls: Counter[str]
) -> tuple[data.Share, ...]:
    stages: dict[str, dict[str, float]] = {}
    for name, stage, seconds in parts:
        mine = stages.setdefault(name, {})
        mine[stage] = mine.get(stage, 0.0) + seconds
    rows = []
    for name, mine in stages.items():
        self_seconds = sum(mine.values())
        rows.append(
            data.Share(name, self_seconds, mine, float(total[name]) if total is not None else self_seconds, calls[name])
        )
    return tuple(sorted(rows, key=lambda row: -row.seconds))
