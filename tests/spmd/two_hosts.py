"""Bodies of the test of two processes with four devices each."""

from __future__ import annotations

import os

import numpy as np
import torch

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla import _XLAC
from torch_xla._core.job import session, watch

STEPS, ROWS = 3, 16


def start() -> None:
    """As torchrun starts a process on each host; our launcher gives each one device."""
    os.environ["CPU_NUM_DEVICES"] = "4"
    os.environ["XLA_HOST_COMPUTE"] = "never"  # what the host computes for a read is no program that may differ
    xr.use_spmd()
    assert os.environ["XLA_USE_SPMD"] == "1"  # of what this process starts


def grid() -> xs.Mesh:
    return xs.Mesh(np.arange(8), (4, 2), ("data", "model"))


def reference() -> list[float]:
    """The losses of one device."""
    model, optimizer = made("cpu")
    losses = []
    for x in batches():
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def made(device: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8)).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches() -> list[torch.Tensor]:
    return list(torch.randn(STEPS, ROWS, 8, generator=torch.Generator().manual_seed(1)))


def train(rank: int, expected: list[float]) -> None:
    """Each process gives its rows; parameters are split over the devices of both."""
    start()
    assert xr.global_runtime_device_count() == 8 and xr.addressable_runtime_device_count() == 4
    assert xr.process_count() == 2 and xr.process_index() == rank and torch_xla.device() == torch.device("xla:0")
    mesh = grid()
    t = torch.arange(64.0).reshape(8, 8)
    for spec in (("data", "model"), ("model", "data"), (None, "data")):
        split = xs.mark_sharding(t.to("xla"), mesh, spec)
        assert split.cpu().equal(t) and len(split.local_shards) == 4
        assert all(shard.data.equal(t[tuple(shard.indices)]) for shard in split.local_shards)
    model, optimizer = made("xla")
    xs.mark_sharding(model[0].weight, mesh, ("model", "data"))
    xs.mark_sharding(model[2].weight, mesh, ("data", "model"))
    own = [x.chunk(2)[rank] for x in batches()]
    spec = xs.ShardingSpec(mesh, ("data", None), minibatch=True)
    losses = []
    for x in pl.MpDeviceLoader(own, torch_xla.device(), input_sharding=spec):
        assert x.shape == (ROWS, 8)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        losses.append(loss.item())
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-5)
    (whole,) = xm.send_cpu_data_to_device([batches()[0]], torch_xla.device(), xs.ShardingSpec(mesh, ("data", None)))
    assert whole.shape == (ROWS, 8) and whole.cpu().equal(batches()[0])
    moments = optimizer.state[model[0].weight]["exp_avg"]
    assert _XLAC._get_xla_sharding_spec(moments) == "{devices=[2,4]0,2,4,6,1,3,5,7}"


def differ(rank: int, how: str) -> None:
    """What is not the same on both is said on both, before it runs."""
    start()
    x = torch.ones(8, 8).to("xla")
    xs.mark_sharding(x, grid(), ("data", "model"))
    if how == "values":
        weight = torch.full((8, 8), float(rank)).to("xla")
        (x @ weight).sum()
        words = "ranks 0 and 1 have other values in what both have a copy of"
    elif how == "numbers":
        x.mul_(2.5 + rank)
        words = "the processes differ in what they do together: rank 0 runs aten.mul"
    else:
        x = x.sin() if rank else x.cos()
        words = "rank 0 runs aten.cos"
    try:
        y = x + 1 if how != "values" else x @ weight
        torch_xla.sync()
    except torch_xla._errors.JobError as error:
        assert words in str(error) and session.connection().stopped is not None, error
    else:
        raise AssertionError(f"nothing was said of {how}: {y.shape}")


def read(rank: int, how: str) -> None:
    """A read of what is split over processes takes all of them, and the same tensor in all."""
    start()
    watch._LEAVES_WITHIN = 1.0
    here = [torch.arange(64.0).reshape(8, 8) + 1000 * i for i in range(2)]
    tensors = [x.to("xla") for x in here]
    for x in tensors:
        xs.mark_sharding(x, grid(), (("data", "model"), None))

    def right(*places: int) -> bool:
        return all(tensors[i].cpu().equal(here[i]) for i in places)

    for _ in range(2):  # a program that all know
        ends = [x.sum(0) for x in tensors]
        torch_xla.sync()
    if how == "by all":
        tensors = [x + 1 for x in tensors]
        here = [x + 1 for x in here]
        assert right(0, 1, 1)
    elif how == "in another order":
        try:
            assert right(*((0, 1) if rank == 0 else (1, 0)))
        except torch_xla._errors.JobError as error:
            assert session.connection().stopped == str(error)
            raise
        raise AssertionError("nothing was said")
    elif how == "by one alone":
        assert rank == 1 or right(0)
        for _ in range(3):
            ends = [x.sum(0) for x in tensors]
            torch_xla.sync(wait=True)
        raise AssertionError(f"nothing was said of {ends}")
    elif how == "of known programs in another order":
        sums = [x.cpu() for x in (ends if rank == 0 else reversed(ends))]
        for _ in range(2):
            assert tensors[0].sum().item() == here[0].sum().item() and tensors[0].amax().item() == 63
        value = tensors[0].sum().item() if rank == 0 else tensors[0].amax().item()
        raise AssertionError(f"nothing was said of {value}, {sums}")
    elif rank == 0:
        right(0)
