"""Training by several processes, as PyTorch has it; what they run is in training_bodies.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import training_bodies

from torch_xla._core.job import launcher

pytestmark = pytest.mark.costs("processes of a job, which start and compile each for itself")


def test_distributed_data_parallel() -> None:
    launcher.run(training_bodies.ddp, (), 2)


def test_distributed_data_parallel_as_whole_graphs() -> None:
    launcher.run(training_bodies.whole_steps, (), 2)


def test_compiled_distributed_data_parallel() -> None:
    launcher.run(training_bodies.compiled_ddp, (), 2)


@pytest.mark.own_client("a collective cuts the step there, which a capture refuses")
def test_steps_that_are_captured() -> None:
    launcher.run(training_bodies.captured, (), 2)


def test_meshes_of_processes() -> None:
    launcher.run(training_bodies.mesh, (), 4)


def test_fully_sharded_and_resumed_by_more_processes(tmp_path: Path) -> None:
    launcher.run(training_bodies.sharded, (str(tmp_path),), 2)
    launcher.run(training_bodies.resume, (str(tmp_path),), 4)


def test_fully_sharded_modules() -> None:
    launcher.run(training_bodies.fully_sharded_modules, (), 2)


def test_state_from_one_process_and_a_checkpoint_that_is_written_meanwhile(tmp_path: Path) -> None:
    launcher.run(training_bodies.state_from_rank_0, (str(tmp_path),), 2)


def test_optimizers_whose_state_is_split() -> None:
    launcher.run(training_bodies.split_optimizers, (), 2)
