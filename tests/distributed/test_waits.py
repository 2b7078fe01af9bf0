"""No process waits for ever: for one that waits elsewhere, or for one that is gone."""

from __future__ import annotations

import collective_bodies
import pytest

from torch_xla._core.job import launcher


def test_a_read_by_one_while_others_are_in_a_barrier_of_the_store() -> None:
    launcher.run(collective_bodies.elsewhere, (), 2)


@pytest.mark.parametrize("way", ["all_reduce", "recv", "object"])
def test_who_waits_on_the_host_learns_who_is_gone(way: str) -> None:
    launcher.run(collective_bodies.abandoned, (way,), 2)
