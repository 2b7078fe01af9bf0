"""The demo, as `make demo` runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_demo_reaches_its_accuracy_and_draws_its_curves(tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    done = subprocess.run(
        [sys.executable, "examples/digits.py", "--epochs", "12", "--output", str(picture)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "CPU_NUM_DEVICES": "1", "JAX_NUM_CPU_DEVICES": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    accuracy = re.search(r"test accuracy (\d\.\d+)", done.stdout)
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.97
    graphs = re.search(r"(\d+) graphs compiled", done.stdout)
    assert graphs is not None
    assert int(graphs[1]) == 2, "one graph trains, one tests"
    assert "Counter: CachedCompile" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "%|" not in done.stderr, "no progress bar where there is no terminal"
