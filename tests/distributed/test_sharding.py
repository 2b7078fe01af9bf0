"""Sharded parameters and optimizer states over processes; what they run is in sharding_bodies.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import sharding_bodies
import torch
from probes import python

from torch_xla._core.job import launcher

pytestmark = pytest.mark.costs("processes of a job, which start and compile each for itself")


def test_fully_sharded_training_is_that_of_one_process() -> None:
    launcher.run(sharding_bodies.fully_sharded, (), 2)


def test_parameters_are_gathered_where_they_are_read() -> None:
    launcher.run(sharding_bodies.gathered_where_read, (), 2)


def test_clipping_and_accumulation() -> None:
    launcher.run(sharding_bodies.clipped_and_accumulated, (), 2)


def test_types_frozen_parameters_and_files(tmp_path: Path) -> None:
    launcher.run(sharding_bodies.types_and_files, (str(tmp_path),), 2)
    command = ["-m", "torch_xla.distributed.fsdp.consolidate_sharded_ckpts"]
    python(*command, "--ckpt_prefix", tmp_path / "net", "--ckpt_suffix", "_rank-*.pth", imported=True)
    plain = sharding_bodies.net()
    plain.load_state_dict(torch.load(tmp_path / "net_consolidated.pth")["model"], strict=False)
    expected, _ = sharding_bodies.reference()
    sharding_bodies.close(plain.state_dict(), expected)


def test_an_optimizer_with_split_state_steps_as_a_whole_one() -> None:
    launcher.run(sharding_bodies.zero, (), 2)
