"""Jobs whose programs span the devices of all processes and use XLA's own collectives, as on GPUs and TPUs."""

from __future__ import annotations

from pathlib import Path

import collective_table
import pytest
import test_compiling
import torch

import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla._core.device import placement
from torch_xla._core.job import launcher

pytestmark = [
    pytest.mark.costs("processes of a job, which start and compile each for itself"),
    pytest.mark.own_client("a plugin for CPUs knows its own process only"),
    pytest.mark.compiled("it is about programs"),
]


@pytest.fixture(autouse=True)
def own_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_CPU_COLLECTIVES", "xla")


def body(index: int) -> None:
    x = torch.arange(6.0, device="xla") + index
    y = xm.all_reduce("sum", x * 2)
    assert y.tolist() == [2.0 * (2 * i + 1) for i in range(6)]
    assert placement.of(0).spans_job
    weight = torch.ones(3, device="xla", requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        (weight * (index + 1.0)).sum().backward()
        xm.optimizer_step(optimizer)
        torch_xla.sync()
    host = torch.ones(3, requires_grad=True)
    reference = torch.optim.Adam([host], lr=0.5)
    for _ in range(3):
        reference.zero_grad()
        (host * 1.5).sum().backward()
        reference.step()
    torch.testing.assert_close(weight.detach().cpu(), host.detach())
    copied = weight.detach().clone()
    weight.data.zero_()
    assert copied.cpu().abs().sum().item() > 0 and weight[1:].sum().item() == 0


@pytest.mark.compiled("the first value is read before there is a client", reads=False)
def test_programs_of_all_devices() -> None:
    launcher.run(body, (), 2)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.sweep)])
def test_the_table(world: int, tmp_path: Path) -> None:
    launcher.run(collective_table.run, (str(tmp_path),), world)
    count, wrong = collective_table.results(tmp_path, world)
    assert not wrong and count > 350 * world


def test_equal_programs_are_compiled_by_one(tmp_path: Path) -> None:
    result = test_compiling.seen(tmp_path, "equal")
    assert all(rank["equal"] for rank in result) and sum(rank["UncachedCompile"] for rank in result) == 1


def differ(index: int) -> None:
    x = torch.ones(3, device="xla")
    y = xm.all_reduce("sum" if index == 0 else "max", x)
    torch_xla.sync(wait=True)
    assert y is not None


def test_processes_that_differ_learn_it() -> None:
    with pytest.raises(torch.multiprocessing.ProcessRaisedException, match="the processes differ in what they do"):
        launcher.run(differ, (), 2)
