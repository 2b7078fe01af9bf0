"""The example of several devices, in small: however it trains, it has the loss of a single device."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import example_bodies
import pytest
from probes import PACKAGE, ROOT, python

from examples import train_digits_multi as example
from torch_xla._core.job import launcher

pytestmark = pytest.mark.costs("processes of a job, which start and compile each for itself")

pytest.importorskip("sklearn", reason="the digits are scikit-learn's")


@cache
def single() -> float:
    return example.train(0, example.parse(example_bodies.SMALL))


@pytest.mark.parametrize("ways", [["xm", "ddp", "xla_fsdp", "zero1"], ["fsdp2"]])
def test_processes_have_the_loss_of_one_device(ways: list[str], tmp_path: Path) -> None:
    launcher.run(example_bodies.train_each_way, (ways, str(tmp_path)), 2)
    results = {how: float((tmp_path / how).read_text()) for how in ways}
    assert results == pytest.approx(dict.fromkeys(ways, single()), rel=1e-3)


def test_threads_have_the_loss_of_one_device() -> None:
    options = example.parse([*example_bodies.SMALL, "--how", "data_parallel"])
    assert example.train_in_threads(options) == pytest.approx(single(), rel=1e-3)


def test_under_torchrun() -> None:
    script = ROOT / "examples" / "train_digits_multi.py"
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, *example_bodies.SMALL]
    done = python(*run, devices=1, cwd=PACKAGE, imported=True)
    losses = re.findall(r"epoch 2: loss ([\d.]+) with 2 processes", done.stdout)
    assert [float(loss) for loss in losses] == pytest.approx([single()], rel=1e-3)
