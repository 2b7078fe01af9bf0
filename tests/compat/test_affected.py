"""`make test-changed` knows every folder, and leaves no test to nobody."""

from __future__ import annotations

import affected
import pytest
from probes import ROOT


def test_every_folder_of_sources_has_its_tests() -> None:
    folders = {
        str(path.parent.relative_to(ROOT))
        for top in ("torch_xla", "torch_xla_py")
        for path in (ROOT / top).rglob("*")
        if path.suffix in (".py", ".cpp") and "__pycache__" not in path.parts
    }
    assert folders <= set(affected.TABLE)


def test_what_the_table_names_is_there() -> None:
    for source, tests in affected.TABLE.items():
        assert (ROOT / source).exists(), source
        for name in tests.split():
            assert name == affected.EVERYTHING or (ROOT / "tests" / name).exists(), f"{source}: {name}"


def test_every_folder_of_tests_is_somebodys() -> None:
    named = {name.split("/")[0] for tests in affected.TABLE.values() for name in tests.split()}
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert folders - named <= {"callers"}  # which look at all of it, some minutes long


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (["torch_xla/ops/norm.py"], ["tests/ops/test_norm.py"]),
        (["torch_xla/ops/registry.py"], ["tests/lower", "tests/opdb/test_opdb.py", "tests/ops"]),
        (["torch_xla/ops/norm.py", "tests/ops/harness.py"], ["tests/ops"]),
        (["torch_xla/_core/graph/verify.py", "tests/cut/test_held.py"], ["tests/cut", "tests/graph", "tests/lower"]),
        (["tests/run/test_executor.py", "docs/spmd.md", "Makefile"], ["tests/docs", "tests/run/test_executor.py"]),
        (["tests/conftest.py", "torch_xla/ops/norm.py"], ["tests"]),
        (["torch_xla/amp/grad_scaler.py"], ["tests/torch_utils"]),
        (["something/new.py"], ["tests"]),
        ([], []),
    ],
)
def test_what_changes_touch(changed: list[str], expected: list[str]) -> None:
    assert affected.selection(changed) == expected
