"""Collectives of the processes of a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.job import collective_table
from torch_xla._core.job import launcher

pytestmark = pytest.mark.costs("processes of a job, which start and compile each for itself")


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    "way",
    [
        pytest.param("compiled", marks=pytest.mark.compiled("both ways")),
        pytest.param("by default", marks=pytest.mark.by_default("both ways")),
    ],
)
def test_the_table(way: str, world: int, tmp_path: Path) -> None:
    launcher.run(collective_table.run, (str(tmp_path),), world)
    count, wrong = collective_table.results(tmp_path, world)
    assert not wrong
    assert count > 350 * world
