"""The notebook runs from top to bottom, learns, and shows its curve, its progress and the profile's page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from probes import PACKAGE, ROOT

nbformat = pytest.importorskip("nbformat", reason="notebooks are run by nbclient")
nbclient = pytest.importorskip("nbclient", reason="notebooks are run by nbclient")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the client itself
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE))
    monkeypatch.setenv("CPU_NUM_DEVICES", "1")
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    accuracy = re.search(r"test accuracy (\d\.\d+)", text)
    assert accuracy is not None
    assert float(accuracy[1]) > 0.85
    assert "100%" in text
    assert any("image/png" in output.get("data", {}) for output in outputs)
    pages = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert any("iframe" in page and "steps" in page for page in pages)
