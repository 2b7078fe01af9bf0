"""The report as text for a terminal, and as a page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch_xla import _config
from torch_xla._core.device import chips, described
from torch_xla._core.device.memory_stats import in_bytes
from torch_xla.debug._ahead.report import Program, Report
from torch_xla.debug._profile import words
from torch_xla.debug._profile.page import render

_ROWS = 10
_BOUNDS = {"products": "products", "memory": "memory traffic", "links": "links"}

_ABOUT_CHIPS = (
    "Figures are of one device; a v7x chip has two, another chip is one. Links: all of them, both directions.",
    "Memory is what programs may use, as the compiler of libtpu 0.0.42 says.",
)


def text(report: Report) -> str:
    """The report as text."""
    return "\n".join(_lines(report)) + "\n"


def page(report: Report) -> str:
    """The report as a page, with memory over each program."""
    data = {"programs": [[program.live, program.operators] for program in report.programs], "limit": described.memory()}
    programs = [list(_program(i, program)) for i, program in enumerate(report.programs, 1)]
    before, after = "\n".join(_head(report)), "\n".join(_tail(report))
    template = Path(__file__).with_name("report.html")
    return render(template, data, report=report, before=before, programs=programs, after=after)


def _lines(report: Report) -> Iterator[str]:
    yield from _head(report)
    for i, program in enumerate(report.programs, 1):
        yield ""
        yield from _program(i, program)
    yield from _tail(report)


def _head(report: Report) -> Iterator[str]:
    limit = described.memory()
    each = f" of {in_bytes(limit)}" if limit else ""
    job = f", rank {report.rank} of {report.processes} processes" if report.processes > 1 else ""
    yield f"{report.script} on {report.topology}: {words.count(report.chips, 'device')}{each}{job}; {report.compiler}"
    yield "nothing was computed: values are zero where they were read"


def _tail(report: Report) -> Iterator[str]:
    if not report.programs:
        yield ""
        yield "no program was compiled: nothing was made on device xla, or read or synced, but what the host computes"
    reads, files = (
        [f"{words.short(what)}: {words.count(count, 'time')}" for what, count in sorted(c.items(), key=lambda r: -r[1])]
        for c in (report.reads, report.unwritten)
    )
    on_host = [f"{op}, {words.short(how)}" for op, how in sorted(report.on_host.items())]
    yield from _section("values that were read, zero here; on chips the script may go another way from there:", reads)
    yield from _section("operators that ran on the host:", on_host)
    yield from _section("files that were not written, as their values would be zero (--write writes them):", files)
    yield ""
    if report.cached:
        kept = f"{words.count(report.cached, 'program')} kept in {_config.XLA_PERSISTENT_CACHE_PATH.get()}"
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
    size = f"{words.count(program.operators, 'operator')}{loops}"
    took = f"compiled in {program.seconds:.1f} s, {words.count(program.runs, 'run')}"
    yield f"program {number}{called}, at {words.short(program.line)}: {verdict}; {size}, {took}"
    yield f"  new because  {words.short(program.new)}"
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
        over = collective.axes or f"groups of {collective.group}"
        yield f"  {collective.kind:<19}  {collective.count} of {in_bytes(collective.nbytes)} in all, over {over}"
    for cause, kinds in program.theory.items():
        parts = [f"{kind} {in_bytes(nbytes)}" for kind, nbytes in kinds.items()]
        yield f"  in theory    {', '.join(parts)}, for {cause}"
    if program.bounds and not program.refused:
        longest = max(program.bounds, key=lambda name: program.bounds[name])
        least = program.bounds[longest]
        each = ", ".join(f"{_BOUNDS[name]} {words.seconds(value)}" for name, value in program.bounds.items())
        share = f"; at most {program.bounds['products'] / least:.0%} of the chip's peak" if least else ""
        yield f"  a run takes  {words.seconds(least)} at least, a bound and no forecast: {each}{share}"


def _largest(program: Program) -> Iterator[str]:
    if not program.largest:
        return
    yield "  largest values where it needs most, in the order of recording:"
    for held in program.largest:
        times = f" × {held.count}" if held.count > 1 else ""
        kept = ", kept for the backward pass" if held.kept else ""
        line = f", at {words.short(held.line)}" if held.line else ""
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


def topologies() -> str:
    """The chips that there are."""
    rows = [("chip", "memory", "bfloat16", "int8", "memory traffic", "links", "such as", "source")]
    shapes = {2: ("2x2", "4x4", "8x8", "16x16"), 3: ("2x2x1", "2x2x2", "4x4x4")}
    for chip in chips.CHIPS:
        such_as = ", ".join(f"{chip.name}:{shape}" for shape in shapes[chip.dimensions])
        int8 = f"{chip.peak_int8 / 1e12:,.0f} TOP/s" if chip.peak_int8 else ""
        peaks = f"{chip.peak / 1e12:,.0f} TFLOP/s", int8
        traffic = f"{chip.bandwidth / 1e9:,.0f} GB/s", f"{chip.links / 1e9:,.0f} GB/s"
        rows.append((chip.name, f"{chip.memory / chips.GIB:.2f} GiB", *peaks, *traffic, such_as, chip.source))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "", *_ABOUT_CHIPS])
