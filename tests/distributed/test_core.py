"""`xm`, `xf`, loaders and files in jobs of several processes; what they run is in core_bodies.py."""

from __future__ import annotations

from pathlib import Path

import core_bodies
import pytest
import torch
import torch.multiprocessing

from torch_xla._core.job import launcher
from torch_xla.utils import serialization

pytestmark = pytest.mark.costs("processes of a job, which start and compile each for itself")


def test_gradients_are_those_of_one_process() -> None:
    launcher.run(core_bodies.functions, (), 2)


@pytest.mark.compiled("it counts programs")
@pytest.mark.own_client("a collective runs at once")
def test_a_read_that_needs_nobody_leaves_collectives_pending() -> None:
    launcher.run(core_bodies.reads, (), 2)


@pytest.mark.by_default("graphs are not compiled at once")
def test_a_rank_may_run_op_by_op_what_another_has_compiled() -> None:
    launcher.run(core_bodies.mixed, (), 3)


def test_lists_travel_in_buckets() -> None:
    launcher.run(core_bodies.buckets, (), 2)


def test_steps_broadcasts_seeds_and_files(tmp_path: Path) -> None:
    launcher.run(core_bodies.steps, (str(tmp_path),), 2)


@pytest.mark.compiled("it counts programs")
def test_loaders_give_each_sample_to_one_process() -> None:
    launcher.run(core_bodies.loaders, (), 2)


@pytest.mark.parametrize("which", ["file.pt", "big"])
def test_a_kill_in_mid_save_leaves_the_file_before(which: str, tmp_path: Path) -> None:
    with pytest.raises(torch.multiprocessing.ProcessExitedException, match="SIGKILL"):
        launcher.run(core_bodies.killed_in_mid_save, (str(tmp_path), which), 1)
    result = torch.load(tmp_path / which) if which == "file.pt" else serialization.load(str(tmp_path / which))
    assert result["x"].tolist() == [1, 1, 1, 1]
