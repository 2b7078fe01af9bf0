"""The processes of a job compile a program once: in memory of each other, and from the disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
from torch_xla._core.job import launcher

pytestmark = pytest.mark.compiled("it counts programs")
COUNTS = ("UncachedCompile", "SharedCompile", "PersistentCacheHit")


def train(index: int, folder: str, how: str) -> None:
    """Three equal steps; writes how the first came to its program."""
    if how == "disk":
        xr.initialize_cache(f"{folder}/cache")
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torch.arange(12.0, device="xla").reshape(3, 4) * (index + 1)
    torch_xla.sync()
    xm.rendezvous("prepared")
    met.clear_all()
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(data).square().mean()
        if how == "unequal" and index == 1:
            loss = loss.tanh()
        loss.backward()
        xm.optimizer_step(optimizer)
        torch_xla.sync()
    values = [value.detach().cpu().tolist() for value in model.parameters()]
    results = {name: met.counter_value(name) or 0 for name in COUNTS}
    results["equal"] = xm.mesh_reduce("values", values, lambda all: all[0] == all[1])
    (Path(folder) / f"{index}.json").write_text(json.dumps(results))


def seen(folder: Path, how: str) -> list[dict[str, int]]:
    launcher.run(train, (str(folder), how), 2)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.own_client("on a plugin each step is two programs, before and after its collective")
@pytest.mark.parametrize("how", ["equal", "unequal"])
def test_equal_programs_are_compiled_by_one(how: str, tmp_path: Path) -> None:
    result = seen(tmp_path, how)
    assert [rank["equal"] for rank in result] == [True, True]
    compiled, loaded = (sum(rank[name] for rank in result) for name in COUNTS[:2])
    assert (compiled, loaded) == ((1, 1) if how == "equal" else (2, 0))


@pytest.mark.own_client("on a plugin each step is two programs, before and after its collective")
@pytest.mark.costs("processes of a job, which start and compile each for itself")
def test_the_next_job_finds_them_on_the_disk(tmp_path: Path) -> None:
    first = seen(tmp_path, "disk")
    again = seen(tmp_path, "disk")
    assert sum(rank["UncachedCompile"] for rank in first) == 1
    assert [(rank["UncachedCompile"], rank["SharedCompile"]) for rank in again] == [(0, 0)] * 2
    assert all(rank["PersistentCacheHit"] == 1 and rank["equal"] for rank in again)
