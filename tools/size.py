"""Lines by part and the longest files, beside the budget of `size.toml`; as a check it fails above that.

Example::

    python tools/size.py            # what is where
    python tools/size.py --check    # as `make lint` does
    python tools/size.py --lower    # after lines were taken away
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGET = ROOT / "size.toml"
PARTS = {
    "package": ("torch_xla/*.py", "torch_xla_py/*.py"),
    "csrc": ("torch_xla/csrc/*.cpp", "torch_xla/csrc/*.h"),
    "tests": ("tests/*.py",),
}
STEP = 100  # the budget is in hundreds of lines, so that few changes touch it


def git(*arguments: str) -> str:
    """What git prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def lines_of(*patterns: str) -> dict[str, int]:
    """Lines of the files that git knows, by name."""
    names = git("ls-files", "--", *patterns).splitlines()
    return {name: len((ROOT / name).read_text().splitlines()) for name in names if (ROOT / name).exists()}


def above(count: int) -> int:
    """The budget of so many lines: whole hundreds, half of one more at least."""
    return -(-(count + STEP // 2) // STEP) * STEP


def problems(lines: dict[str, int], budget: dict[str, int]) -> list[str]:
    """What is wrong with parts of so many lines, in words."""
    found = []
    for part, limit in budget.items():
        if lines[part] > limit:
            found.append(
                f"{part} has {lines[part]} lines, more than {limit}: take some away, or raise size.toml and say why"
            )
        elif lines[part] <= limit - 3 * STEP:
            found.append(f"{part} has {lines[part]} lines, its budget is {limit}: python tools/size.py --lower")
    return found


def raised(diff: str) -> list[str]:
    """The parts whose budget a change of `size.toml` raises."""
    old = {name: int(count) for name, count in re.findall(r"^-(\w+) = (\d+)", diff, re.MULTILINE)}
    new = {name: int(count) for name, count in re.findall(r"^\+(\w+) = (\d+)", diff, re.MULTILINE)}
    return [name for name in old.keys() & new.keys() if new[name] > old[name]]


def unexplained() -> list[str]:
    """Whether the latest change of the budget raises it without a reason: its message has a line ``Size: …``."""
    latest = git("log", "-1", "--format=%H", "--", BUDGET.name).strip()
    if not latest or not raised(git("show", "--format=", latest, "--", BUDGET.name)):
        return []
    body = git("log", "-1", "--format=%b", latest)
    return (
        []
        if re.search(r"^Size: \S", body, re.MULTILINE)
        else [f"{latest[:8]} raises size.toml without a line `Size: why`"]
    )


def main(arguments: list[str]) -> int:
    """Does what the command line says; the exit status."""
    lines = {part: sum(lines_of(*patterns).values()) for part, patterns in PARTS.items()}
    budget = tomllib.loads(BUDGET.read_text())
    if "--lower" in arguments:
        text = BUDGET.read_text()
        for part, limit in budget.items():
            text = text.replace(f"{part} = {limit}", f"{part} = {min(limit, above(lines[part]))}")
        BUDGET.write_text(text)
        return 0
    if "--check" in arguments:
        found = [*problems(lines, budget), *unexplained()]
        print("\n".join(f"size: {text}" for text in found), end="\n" if found else "")
        return bool(found)
    for part, count in lines.items():
        print(f"{count:7d} of {budget[part]:6d}  {part}")
    files = lines_of("*.py", "*.cpp", "*.h")
    for name in sorted(files, key=lambda name: -files[name])[:10]:
        print(f"{files[name]:7d}  {name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
