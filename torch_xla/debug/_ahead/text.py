"""The report as text for a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator

from torch_xla import _config
from torch_xla._core.device import chips, described
from torch_xla._core.device.memory_stats import in_bytes
from torch_xla.debug._ahead.report import Collective, Program, Report

_ROWS = 10
_BOUNDS = {"products": "products", "memory": "memory traffic", "links": "links"}


def text(report: Report) -> str:
    """The report as text."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    limit = described.memory()
    each = f" of {in_bytes(limit)}" if limit else ""
    job = f", rank {report.rank} of {report.processes} processes" if report.processes > 1 else ""
    yield f"{report.script} on {report.topology}: {_count(report.chips, 'device')}{each}{job}; {report.compiler}"
    yield "nothing was computed: values are zero where they were read"
    for i, program in enumerate(report.programs, 1):
        yield ""
        yield from _program(i, program)
    if not report.programs:
        yield ""
        yield "no program was compiled: the script made nothing on device xla, or ended before a barrier"
    reads = sorted(report.reads.items(), key=lambda row: -row[1])
    yield from _section(
        "values that were read, zero here; on chips the script may go another way from there:",
        [f"{_short(line)}: {_count(count, 'time')}" for line, count in reads],
    )
    yield from _section(
        "operators that ran on the host:", [f"{op}, {_short(how)}" for op, how in sorted(report.on_host.items())]
    )
    yield from _section(
        "files that were not written, as their values would be zero (--write writes them):",
        [f"{_short(what)}: {_count(count, 'time')}" for what, count in sorted(report.unwritten.items())],
    )
    yield ""
    if report.cached:
        kept = f"{_count(report.cached, 'program')} kept in {_config.XLA_PERSISTENT_CACHE_PATH.get()}"
        yield f"{kept}, under the keys that a slice asks for; that was not tried on chips"
    if report.failed:
        yield f"the script failed: {report.failed}"
    if report.ended:
        yield f"the script was ended {report.ended}"
    yield _verdict(report)


def _section(title: str, rows: list[str]) -> Iterator[str]:
    if rows:
        yield ""
        yield title
        yield from (f"  {row}" for row in rows[:_ROWS])
    if len(rows) > _ROWS:
        yield f"  and {len(rows) - _ROWS} others"


def _verdict(report: Report) -> str:
    if not report.programs:
        return "nothing to tell"
    refused = [i for i, program in enumerate(report.programs, 1) if not program.fits]
    if refused:
        return f"does not fit, or is refused: program {', '.join(map(str, refused))} of {len(report.programs)}"
    need = max(program.memory.total for program in report.programs)
    limit = described.memory()
    rest = f" of {in_bytes(limit)}, {need / limit:.1%}" if limit else ""
    subject = f"all {len(report.programs)} programs fit" if len(report.programs) > 1 else "the program fits"
    return f"{subject}: a chip needs {in_bytes(need)}{rest}"


def _program(number: int, program: Program) -> Iterator[str]:
    called = f" {program.name}" if program.name else ""
    loops = f", loops of {', '.join(map(str, program.loops))} layers" if program.loops else ""
    verdict = "refused" if program.refused else "fits" if program.memory.fits else "does not fit"
    size = f"{_count(program.operators, 'operator')}{loops}"
    took = f"compiled in {program.seconds:.1f} s, {_count(program.runs, 'run')}"
    yield f"program {number}{called}, at {_short(program.line)}: {verdict}; {size}, {took}"
    yield f"  new because  {_short(program.new)}"
    if program.refused:
        yield f"  refused      {program.refused[:400]}"
    else:
        memory = program.memory
        parts = "arguments results temporaries code others".split()
        sizes = ", ".join(f"{part} {in_bytes(getattr(memory, part))}" for part in parts if getattr(memory, part))
        limit = f" of {in_bytes(memory.limit)} ({memory.total / memory.limit:.1%})" if memory.limit else ""
        yield f"  memory       {in_bytes(memory.total)}{limit}: {sizes}"
        moved = in_bytes(program.nbytes)
        yield f"  work         {program.flops:.3g} flops in products, {moved} from and to memory at least"
    yield from _largest(program)
    for collective in program.collectives:
        yield f"  {_collective(collective)}"
    if program.theory:
        parts = [f"{kind} {in_bytes(nbytes)}" for kind, nbytes in program.theory.items()]
        yield f"  in theory    {', '.join(parts)}, for parameters and their gradients"
    if program.bounds and not program.refused:
        longest = max(program.bounds, key=lambda name: program.bounds[name])
        least = program.bounds[longest]
        each = ", ".join(f"{_BOUNDS[name]} {_time(value)}" for name, value in program.bounds.items())
        share = f"; at most {program.bounds['products'] / least:.0%} of the chip's peak" if least else ""
        yield f"  a run takes  {_time(least)} at least, a bound and no forecast: {each}{share}"


def _largest(program: Program) -> Iterator[str]:
    if not program.largest:
        return
    yield "  largest values where it needs most, in the order of recording:"
    for held in program.largest:
        times = f" × {held.count}" if held.count > 1 else ""
        kept = ", kept for the backward pass" if held.kept else ""
        line = f", at {_short(held.line)}" if held.line else ""
        yield f"    {in_bytes(held.nbytes)}: {held.shape}{times}, {held.what}{line}{kept}"
    kept_bytes = sum(held.nbytes for held in program.largest if held.kept)
    arguments = sum(held.nbytes for held in program.largest if held.what == "an argument")
    yield "  what to try:"
    if kept_bytes:
        remedy = "torch.utils.checkpoint around each layer computes it again"
        yield f"    keep less for the backward pass ({in_bytes(kept_bytes)} of these): {remedy}"
    if arguments:
        yield f"    split what goes in ({in_bytes(arguments)} of these) over more devices, parameters as with FSDP"
    yield "    fewer or shorter rows for each chip; a mesh axis for the sequence splits long ones; autocast to bfloat16"


def _collective(collective: Collective) -> str:
    over = collective.axes or f"groups of {collective.group}"
    size = in_bytes(collective.nbytes)
    return f"{collective.kind:<19}  {collective.count} of {size} in all, over {over}"


def topologies() -> str:
    """The chips that there are."""
    rows = [("chip", "memory", "bfloat16", "int8", "memory traffic", "links", "such as", "source")]
    for chip in chips.CHIPS:
        numbers = {2: "2x2, 4x4, 8x8, 16x16", 3: "2x2x1, 2x2x2, 4x4x4"}[chip.dimensions]
        rows.append(
            (
                chip.name,
                f"{chip.memory / (1 << 30):.2f} GiB",
                f"{chip.peak / 1e12:,.0f} TFLOP/s",
                f"{chip.peak_int8 / 1e12:,.0f} TOP/s",
                f"{chip.bandwidth / 1e9:,.0f} GB/s",
                f"{chip.links / 1e9:,.0f} GB/s",
                ", ".join(f"{chip.name}:{n}" for n in numbers.split(", ")),
                chip.source,
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.append("")
    lines.append(
        "Figures are of one device; a v7x chip has two, another chip is one. Links: all of them, both directions."
    )
    lines.append("Memory is what programs may use, as the compiler of libtpu 0.0.42 says.")
    return "\n".join(lines)


def _count(number: object, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _short(line: str) -> str:
    return line.replace(os.getcwd() + os.sep, "")


def _time(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs"
