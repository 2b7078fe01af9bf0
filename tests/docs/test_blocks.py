"""The code blocks of the guides run: those of a page one after the other in one process, files as programs.

A block that begins with ``# file: name.py`` is a program of its own. What a page takes for granted stands before a
block in a comment, ``<!-- run`` … ``-->``.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from probes import PACKAGE, ROOT, python

PAGES = ["README.md", *(f"docs/{name}.md" for name in (
    "install", "first-program", "how-it-works", "migrate", "performance", "graphs", "distributed", "export", "devices",
    "caveats", "debugging",
))]  # fmt: skip
SPLIT = "docs/spmd.md"  # its mode is that of a process, over eight devices
BLOCK = re.compile(
    r"^(?P<indent> *)```python\n(?P<shown>.*?)^(?P=indent)```$|^<!-- run\n(?P<hidden>.*?)^-->$",
    re.MULTILINE | re.DOTALL,
)
FILE = re.compile(r"# file: (\S+)\n")
PRINTED = re.compile(
    r"^```python\n(?P<code># file: (?P<name>\S+)\n.*?)^```\n\n```\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
TIMING = re.compile(r"\d+\\\.\d+(?:\\ [mµ]?s\b)?|\d+\\ [mµ]?s\b|\d+%")
HERE = Path(__file__)


@dataclass(frozen=True)
class Block:
    """Code of a page, with the line where it begins, and the name of the file that it is."""

    page: str
    line: int
    code: str
    file: str | None


def blocks(page: str) -> Iterator[Block]:
    text = (ROOT / page).read_text()
    for actual in BLOCK.finditer(text):
        code = textwrap.dedent(actual["shown"] if actual["shown"] is not None else actual["hidden"])
        name = FILE.match(code)
        yield Block(page, text.count("\n", 0, actual.start()) + 2, code, name[1] if name else None)


def printed() -> dict[str, tuple[str, str]]:
    """Programs that a page shows with what they print, by their names."""
    results = [match for page in PAGES for match in PRINTED.finditer((ROOT / page).read_text())]
    return {match["name"]: (match["code"], match["text"]) for match in results}


def pattern(text: str) -> str:
    """What a page says that a program prints: timings are other ones, and findings of a profile come and go by them."""
    lines = re.sub(r"(?m)(^  - .*\n)+", "FINDINGS\n", text)
    timed = TIMING.sub(r"[\\d.]+(?:%|\\ [mµ]?s)?", re.escape(" ".join(lines.split())))
    return timed.replace("FINDINGS", r"(?:-\ the\ device\ waited\ for\ .*)?")


def starts_processes(block: Block) -> bool:
    return "launch(" in block.code


def run_pages(pages: list[str]) -> None:
    """Runs the blocks of pages in this process: each page, and each file, has a name space of its own."""
    for page in pages:
        shared: dict[str, object] = {"__name__": "__main__"}
        for block in blocks(page):
            if starts_processes(block):
                continue
            source = "\n" * (block.line - 1) + block.code  # so that tracebacks have the page's lines
            exec(compile(source, str(ROOT / page), "exec"), shared if block.file is None else {"__name__": "__main__"})
        print("ran", page)


def test_every_page_with_code_is_run() -> None:
    with_code = {
        str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md") if "```python" in path.read_text()
    }
    assert with_code <= {*PAGES, SPLIT}


@pytest.mark.slow
def test_blocks_run(tmp_path: Path) -> None:
    done = python(HERE, cwd=tmp_path, devices=1, timeout=250, imported=True, MPLBACKEND="Agg")
    assert sum(line.startswith("ran ") for line in done.stdout.splitlines()) == len(PAGES), done.stdout


@pytest.mark.slow
def test_blocks_over_a_mesh_run(tmp_path: Path) -> None:
    done = python(HERE, SPLIT, cwd=tmp_path, devices=8, timeout=250, imported=True)
    assert f"ran {SPLIT}" in done.stdout.splitlines(), done.stdout


def test_programs_with_their_output_are_found() -> None:
    assert {"ragged.py", "guarded.py", "metrics.py", "reads.py", "profiled.py"} <= set(printed())


@pytest.mark.by_default("what users read is what they get")
@pytest.mark.parametrize("name", printed())
def test_the_page_says_what_the_program_prints(name: str, tmp_path: Path) -> None:
    code, text = printed()[name]
    (tmp_path / name).write_text(code)
    done = python(name, cwd=tmp_path, devices=1, imported=True)
    result = " ".join((done.stdout + done.stderr).replace(f"{tmp_path}/", "").split())
    assert re.fullmatch(pattern(text), result), f"docs say:\n{text}\nprinted:\n{done.stdout}{done.stderr}"


@pytest.mark.costs("processes of a job, which start and compile each for itself")
def test_blocks_that_start_processes_run(tmp_path: Path) -> None:
    results = [block for page in PAGES for block in blocks(page) if starts_processes(block)]
    assert results
    for block in results:
        assert block.file is not None, "processes import the program"
        (tmp_path / block.file).write_text(block.code)
        python(tmp_path / block.file, cwd=tmp_path, devices=2, imported=True)


if __name__ == "__main__":
    sys.path.insert(0, str(PACKAGE))
    run_pages(sys.argv[1:] or PAGES)
