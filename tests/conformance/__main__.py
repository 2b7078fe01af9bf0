"""Runs the own tests of torch_xla 2.9 against this package and writes the table of `docs/conformance.md`.

    PYTHONPATH=tests python -m conformance CHECKOUT [FILE ...]

CHECKOUT is a clone of pytorch/xla at v2.9.0; nothing of it is kept here. Each file runs in a process of its own, with
a time limit. `expected.toml` has the original's passes per file, and the reason for each test that fails here; the
exit status is 1 if a test fails without a reason, or passes in spite of one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "docs" / "conformance.md"
FILES = tomllib.loads((Path(__file__).parent / "expected.toml").read_text())["files"]
MARK = "<!-- written by make conformance -->\n"

Outcomes = dict[str, str]  # of a file: passed, failed or skipped, by the name of the test


def prepared(checkout: Path, folder: Path) -> Path:
    """A copy of the tests in which pytest does not take the original's sources for a package."""
    for name in ("test", "examples"):
        ignored = shutil.ignore_patterns("__init__.py", "__pycache__")
        shutil.copytree(checkout / name, folder / name, symlinks=True, ignore=ignored)
    return folder / "test"


def run(tests: Path, file: str, limit: float) -> Outcomes:
    """Runs a file: with pytest, or by itself where pytest finds no tests in it."""
    path = tests / file
    environment = {
        "PJRT_DEVICE": "CPU",
        **os.environ,
        "CPU_NUM_DEVICES": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(tests), str(path.parent)]),
        **FILES.get(file, {}).get("environment", {}),
    }
    deadline = time.monotonic() + limit

    def succeeds(*command: str) -> bool:
        left = max(deadline - time.monotonic(), 1)
        try:
            done = subprocess.run(
                [sys.executable, *command], cwd=tests, env=environment, capture_output=True, timeout=left
            )
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0

    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        timeout = f"--timeout={FILES.get(file, {}).get('timeout', 300)}"
        succeeds("-m", "pytest", "-q", "-p", "no:cacheprovider", timeout, f"--junitxml={report}", str(path))
        if not report.exists():
            return {"the whole file": "failed"}
        outcomes = {}
        for case in ElementTree.parse(report).getroot().iter("testcase"):
            tags = {child.tag for child in case}
            name = f"{case.get('classname', '').split('.')[-1]}::{case.get('name')}"
            outcomes[name] = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
    return outcomes or {"the script": "passed" if succeeds(str(path)) else "failed"}


def count(outcomes: Outcomes, kind: str) -> int:
    """How many tests had this outcome."""
    return sum(outcome == kind for outcome in outcomes.values())


def table(results: dict[str, Outcomes]) -> str:
    """The files that must do as well as the original, then the others, and why tests fail."""
    text = []
    for title, beyond in (("Operators, dtypes, autocast, optimizers, loops, eager mode", False), ("Beyond", True)):
        text.append(f"## {title}\n\n| file | tests | the original passes | passes | fails | skips |\n")
        text.append("|---|--:|--:|--:|--:|--:|\n")
        for file in (f for f in FILES if FILES[f].get("beyond", False) is beyond):
            outcomes = results.get(file, {})
            counts = [str(count(outcomes, kind)) for kind in ("passed", "failed", "skipped")]
            cells = [str(len(outcomes)), str(FILES[file]["original"]), *(counts if outcomes else ["not run", "", ""])]
            text.append(f"| `{file}` | {' | '.join(cells)} |\n")
        text.append("\n")
    text.append("## What fails, and why\n")
    for file, known in FILES.items():
        reasons: dict[str, list[str]] = {}
        for name, outcome in results.get(file, {}).items():
            if outcome == "failed":
                reasons.setdefault(reason(known, name) or "Not explained yet.", []).append(name.split("::")[-1])
        if reasons:
            text.append(f"\n`{file}`\n\n")
            text += [f"- {', '.join(f'`{name}`' for name in names)}: {why}\n" for why, names in reasons.items()]
    return "".join(text)


def reason(known: dict[str, Any], name: str) -> str | None:
    """Why a test fails, if that is known: by its name, without its class, or for all tests of the file."""
    reasons = known.get("fails", {})
    return reasons.get(name.split("::")[-1], reasons.get("all"))


def wrong(results: dict[str, Outcomes]) -> list[str]:
    """Failures without a reason, and reasons without a failure, among the files that have none left unexplained."""
    actual = []
    for file, outcomes in results.items():
        known = FILES.get(file, {})
        if known.get("beyond", False):
            continue
        for name, outcome in outcomes.items():
            why = reason(known, name)
            if outcome == "failed" and why is None:
                actual.append(f"{file}: {name} fails without a reason in expected.toml")
            if outcome == "passed" and name.split("::")[-1] in known.get("fails", {}):
                actual.append(f"{file}: {name} passes; take it out of expected.toml")
    return actual


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Run the own tests of torch_xla 2.9 against this package.")
    parser.add_argument("checkout", type=Path, help="a clone of pytorch/xla at v2.9.0")
    parser.add_argument("files", nargs="*", help="files below its test folder; all of expected.toml by default")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="files that run side by side")
    parser.add_argument("--limit", type=float, default=1800, help="seconds that a file may take")
    parser.add_argument(
        "--results",
        type=Path,
        default=ROOT / "build" / "conformance.json",
        help="outcomes so far, to which those of FILES are added",
    )
    options = parser.parse_args()
    results: dict[str, Outcomes] = json.loads(options.results.read_text()) if options.results.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        tests = prepared(options.checkout, Path(folder))
        with ThreadPoolExecutor(options.jobs) as pool:
            running = {pool.submit(run, tests, file, options.limit): file for file in options.files or FILES}
            for done in as_completed(running):
                file = running[done]
                results[file] = done.result()
                kinds = ", ".join(f"{count(results[file], kind)} {kind}" for kind in ("passed", "failed", "skipped"))
                print(f"{file:60} {kinds}", flush=True)
                options.results.parent.mkdir(parents=True, exist_ok=True)
                options.results.write_text(json.dumps(results, indent=1))
    head = REPORT.read_text().split(MARK)[0]
    REPORT.write_text(head + MARK + "\n" + table(results))
    problems = wrong(results)
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
