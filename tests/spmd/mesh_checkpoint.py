"""Checkpoints: written by parts, read into other splits, by plain PyTorch, and by the manager."""

from __future__ import annotations

import os
import signal

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch_xla import _XLAC
from torch_xla.experimental.distributed_checkpoint import (
    CheckpointManager,
    SPMDLoadPlanner,
    SPMDSavePlanner,
    prime_optimizer,
)

spec_of = _XLAC._get_xla_sharding_spec
GRID = xs.Mesh(np.arange(8), (4, 2), ("a", "b"))


def model(*spec: str | None) -> torch.nn.Linear:
    made = torch.nn.Linear(18, 16).to("xla")
    xs.mark_sharding(made.weight, GRID, spec)
    return made


def trained(made: torch.nn.Linear) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1)
    made(torch.ones(4, 18, device="xla")).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    torch_xla.sync()
    return made, optimizer


def state(made: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    return {"model": made.state_dict(), "optim": optimizer.state_dict()}


@pytest.fixture
def group(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", world_size=1, rank=0)
    yield
    dist.destroy_process_group()


def test_into_another_mesh_with_the_optimizer(tmp_path, group):
    source, optimizer = trained(model("a", "b"))
    dcp.save(state(source, optimizer), storage_writer=dcp.FileSystemWriter(tmp_path), planner=SPMDSavePlanner())
    target = model(None, "a")  # 18 columns over 4
    other = prime_optimizer(torch.optim.AdamW(target.parameters(), lr=0.1))
    read = state(target, other)
    dcp.load(read, storage_reader=dcp.FileSystemReader(tmp_path), planner=SPMDLoadPlanner())
    assert target.weight.cpu().equal(source.weight.cpu()) and target.bias.cpu().equal(source.bias.cpu())
    assert spec_of(target.weight).startswith("{devices=[1,4,2]")
    for mine, theirs in zip(other.state.values(), optimizer.state.values(), strict=True):
        assert mine["exp_avg"].cpu().equal(theirs["exp_avg"].cpu())
    other_size = {"model": {"weight": xs.mark_sharding(torch.zeros(8, 4).to("xla"), GRID, ("a", "b"))}}
    with pytest.raises(dcp.api.CheckpointException, match=r"got model.weight of size \[8, 4\]"):
        dcp.load(other_size, storage_reader=dcp.FileSystemReader(tmp_path), planner=SPMDLoadPlanner())
    plain = {"model": torch.nn.Linear(18, 16).state_dict()}
    dcp.load(plain, storage_reader=dcp.FileSystemReader(tmp_path))
    assert plain["model"]["weight"].equal(source.weight.cpu())


def test_whole_files(tmp_path):
    source = model("a", "b")
    xm.save(source.state_dict(), tmp_path / "whole.pt")
    loaded = torch.load(tmp_path / "whole.pt")
    assert loaded["weight"].device.type == "cpu" and loaded["weight"].equal(source.weight.cpu())
    target = model("b", None)
    target.load_state_dict(loaded)
    assert spec_of(target.weight).startswith("{devices=[2,1,4]") and target.weight.cpu().equal(source.weight.cpu())


def test_manager(tmp_path, group):
    source = model("a", "b")
    manager = CheckpointManager(str(tmp_path / "run"), save_interval=10, max_to_keep=2)
    assert not manager.save(1, source.state_dict()) and manager.save(10, source.state_dict())
    expected = source.weight.cpu()
    assert manager.save_async(20, source.state_dict())
    with torch.no_grad():
        source.weight.zero_()
    assert manager.save_async(30, source.state_dict())
    manager.join()
    assert manager.all_steps() == [20, 30]
    again = CheckpointManager(str(tmp_path / "run"), save_interval=10)
    assert again.all_steps() == [20, 30]
    target = model(None, "b").state_dict()
    again.restore(20, target)
    assert target["weight"].cpu().equal(expected)
    with pytest.raises(ValueError, match="got step 10"):
        again.restore(10, target)
    os.kill(os.getpid(), signal.SIGTERM)
    assert again.reached_preemption(31) and again.save(31, target)
    _XLAC._deactivate_preemption_sync_manager()


def test_process_group_of_this_device_is_refused():
    import torch_xla.distributed.xla_backend

    assert torch_xla.distributed.xla_backend
    with pytest.raises(RuntimeError, match="SPMD mode"):
        dist.init_process_group("xla", init_method="xla://")
