"""Random programs that run operator by operator and compiled, interrupted, forked and with other settings, in turns."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
from probes import python

pytestmark = pytest.mark.by_default("programs choose themselves how they run")

PROGRAMS = int(os.environ.get("MIXED_PROGRAMS", "12"))
SCRIPT = Path(__file__).with_name("mixed_programs.py")


@pytest.mark.parametrize(
    ("kinds", "threads"),
    [
        ("way,settings,failure,interrupt,allocation", 0),
        ("way,allocation,fork", 1),
    ],
)
@pytest.mark.costs("many random programs")
def test_values_are_the_cpus(kinds: str, threads: int) -> None:
    done = python(SCRIPT, kinds, "0", str(PROGRAMS), str(threads), devices=1, imported=True, timeout=7200)
    assert set(ast.literal_eval(done.stdout)) <= set(kinds.split(","))
