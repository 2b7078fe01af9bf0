"""Threads and forks at work on the recorder for some seconds; `make sanitize` has them work for a minute."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest
from probes import python

SECONDS = float(os.environ.get("STRESS_SECONDS", "4"))


@pytest.mark.slow
@pytest.mark.timeout(10 * SECONDS + 300)
def test_threads_and_forks() -> None:
    ran = python(Path(__file__).with_name("stress.py"), str(SECONDS), devices=4, timeout=10 * SECONDS + 280)
    done = ast.literal_eval(ran.stdout.strip().splitlines()[-1])
    assert set(done) == {"dropped", "views", "chain", "gradients", "numbers", "clones", "together", "cut", "fork"}
