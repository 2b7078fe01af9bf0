"""The demo, as `make demo` runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from probes import ROOT, python


@pytest.mark.slow
@pytest.mark.by_default("the demo's figures are those of use")
def test_the_demo_reaches_its_accuracy_and_draws_its_curves(tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    done = python(
        ROOT / "examples/digits.py", "--epochs", "8", "--output", picture, devices=1, timeout=240, imported=True
    )
    accuracy = re.search(r"test accuracy (\d\.\d+)", done.stdout)
    assert accuracy is not None
    assert float(accuracy[1]) >= 0.97
    graphs = re.search(r"(\d+) graphs compiled", done.stdout)
    assert graphs is not None
    assert int(graphs[1]) == 0, "most of each graph is convolutions, which a program would leave to PyTorch too"
    assert "Counter: MarkStep" in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "%|" not in done.stderr, "no progress bar where there is no terminal"
