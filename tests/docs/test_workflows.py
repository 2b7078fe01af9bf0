"""The workflows do nothing that a make target does not, on the versions that CONTRIBUTING.md names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from probes import ROOT

yaml = pytest.importorskip("yaml", reason="workflows are YAML")


def jobs() -> Iterator[dict[str, Any]]:
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        yield from yaml.safe_load(path.read_text())["jobs"].values()


def test_each_command_is_a_make_target() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [step["run"] for job in jobs() for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        assert re.fullmatch(r"make [^\n;&|]+", command), command
        assert command.split()[1] in targets, command


def test_versions_are_those_of_the_table() -> None:
    rows = re.findall(
        r"^\| (3\.\d+) \| ([\d., ]+) \| ([\d.]+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE
    )
    table = {(python, torch, jax) for python, many, jax in rows for torch in many.split(", ")}
    tested = {
        (row["python"], row["torch"], row["jax"])
        for job in jobs()
        for row in job.get("strategy", {}).get("matrix", {}).get("include", ())
    }
    assert len(table) == 4 and tested == table
