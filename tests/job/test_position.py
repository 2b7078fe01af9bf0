"""The line at which a thread is said to be."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

MODULE = """
import threading
from torch_xla._core.job import waits

FOUND = waits.line(threading.get_ident())
"""


def test_what_a_library_imports_is_no_line_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_by_a_library.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("imported_by_a_library")  # by the standard library, whose lines are no user's
    assert "test_position.py" in module.FOUND


def test_what_the_user_imports_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_by_the_user.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import imported_by_the_user  # type: ignore[import-not-found]

    assert "imported_by_the_user.py" in imported_by_the_user.FOUND
