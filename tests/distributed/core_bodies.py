"""What the processes of a job run in test_core.py; each raises where a value is not that of one process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from probes import setting
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import torch_xla
import torch_xla.core.functions as xf
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
from torch_xla import _config
from torch_xla._core.job import pending_collectives
from torch_xla.distributed.parallel_loader import MpDeviceLoader, ParallelLoader
from torch_xla.utils import serialization


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.detach().cpu(), expected.detach(), rtol=1e-4, atol=1e-5)


def functions(index: int) -> None:
    """Gradients of what all compute alike from values of all, and of batches normalized together."""
    world = xr.world_size()
    parts = torch.randn(world, 3, 2, generator=torch.Generator().manual_seed(1))
    for kind, host in (
        (xm.REDUCE_SUM, lambda x: x.sum(0)),
        (xm.REDUCE_MUL, lambda x: x.prod(0)),
        (xm.REDUCE_MAX, lambda x: x.amax(0)),
        (xm.REDUCE_MIN, lambda x: x.amin(0)),
    ):
        own = parts[index].to("xla").requires_grad_()
        whole = parts.clone().requires_grad_()
        for actual in (xf.all_reduce(kind, own, scale=0.5), host(whole) * 0.5):
            actual.square().sum().backward()
        same(own.grad, whole.grad[index])
    alone = parts[index].to("xla").requires_grad_()
    xf.all_reduce(xm.REDUCE_SUM, alone, groups=[[rank] for rank in range(world)]).square().sum().backward()
    same(alone.grad, 2 * parts[index])
    for dim in (0, -1):
        own, whole = parts[index].to("xla").requires_grad_(), parts.clone().requires_grad_()
        weight = torch.arange(6.0 * world).view(torch.cat(list(parts), dim).shape)
        (xf.all_gather(own, dim).square() * weight.to("xla")).sum().backward()
        (torch.cat(list(whole), dim).square() * weight).sum().backward()
        same(own.grad, whole.grad[index])

    w = torch.randn(4, 3 * world, generator=torch.Generator().manual_seed(2))
    x = torch.randn(world, 3 * world, 4, generator=torch.Generator().manual_seed(3))
    columns = w.chunk(world, 1)[index].to("xla")
    for split in (1, 2):
        same(xf.distributed_mm(columns, x[index].to("xla"), split), w @ x[index])

    # Batches of several sizes, with variances much smaller than the means.
    sizes = [3 + 2 * rank for rank in range(world)]
    batch = 1000 + torch.randn(sum(sizes), 3, 4, generator=torch.Generator().manual_seed(4))
    ours, host = xf.SyncBatchNorm(3, momentum=0.25).to("xla"), nn.BatchNorm1d(3, momentum=0.25)
    own, whole = batch.split(sizes)[index].to("xla").requires_grad_(), batch.clone().requires_grad_()
    outs = [ours(own), host(whole)]
    for out in outs:
        (out.square() * out.detach().cos()).sum().backward()
    torch.testing.assert_close(outs[0].cpu(), outs[1].split(sizes)[index], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(own.grad.cpu(), whole.grad.split(sizes)[index], rtol=1e-2, atol=2e-3)
    for name in ("weight", "bias"):
        gradients = xm.mesh_reduce(name, getattr(ours, name).grad.cpu(), sum)
        torch.testing.assert_close(gradients, getattr(host, name).grad, rtol=1e-3, atol=2e-3)
    torch.testing.assert_close(ours.running_mean.cpu(), host.running_mean)
    count = batch.numel() / 3
    torch.testing.assert_close(
        (ours.running_var.cpu() - 0.75) * count / (count - 1), host.running_var - 0.75, rtol=1e-3, atol=1e-4
    )


def buckets(index: int) -> None:
    """Lists travel in buckets of one dtype up to a size, and give what each tensor alone gives."""
    world = xr.world_size()
    sizes = ((2, 3), (4,), (2, 1, 2), (300_000,), (6,))
    tensors = [(torch.arange(torch.Size(size).numel()).reshape(size) % 97 + index).to("xla") for size in sizes]
    tensors[:4] = [tensor.float() for tensor in tensors[:4]]

    def sent(call: Callable[[], list[torch.Tensor]]) -> tuple[list[torch.Tensor], int]:
        before = torch_xla._bindings.op_counts().get("collective", 0)
        results = call()
        return results, torch_xla._bindings.op_counts()["collective"] - before

    calls = (
        (lambda: xm.all_gather(tensors), lambda cap: xm.all_gather_bucketized(tensors, bucket_cap_mb=cap)),
        (
            lambda: xm.reduce_scatter(xm.REDUCE_SUM, tensors, 0.5, 0, world),
            lambda cap: xm.reduce_scatter_bucketized(xm.REDUCE_SUM, tensors, 0.5, 0, world, bucket_cap_mb=cap),
        ),
    )
    for alone, bucketized in calls:
        expected, count = sent(alone)
        assert count == len(sizes)
        for cap, buckets in ((160, 2), (1, 3), (0, 5)):  # one of three, one of 1.14 MiB, one of integers
            results, count = sent(lambda cap=cap, bucketized=bucketized: bucketized(cap))
            assert count == buckets, (cap, count)
            for result, each in zip(results, expected, strict=True):
                assert torch.equal(result.cpu(), each.cpu())
        assert bucketized(160)[0].shape == expected[0].shape


def reads(index: int) -> None:
    """What needs nobody is read without running what does: one program, not two."""
    x = torch.ones(2, device="xla")
    torch_xla.sync()
    before = met.counter_value("UncachedCompile") or 0
    with setting(_config.XLA_HOST_COMPUTE, "reads"):
        total = xm.all_reduce(xm.REDUCE_SUM, x)
        assert (torch.arange(8, device="xla").diff() == 1).all()
        assert pending_collectives.newest() is not None
        assert total[0].item() == xr.world_size()  # which does need the others
        assert pending_collectives.newest() is None
    assert (met.counter_value("UncachedCompile") or 0) - before <= 2


def mixed(index: int) -> None:
    """Rank 0 compiles each graph at once, the others run theirs op by op, until they repeat: with the same values."""
    world = xr.world_size()
    before = {name: met.counter_value(name) or 0 for name in ("UncachedCompile", "UncompiledRun")}
    with setting(_config.XLA_HOST_COMPUTE, "new" if index else "reads"):
        for step in range(3):
            x = torch.arange(6.0 * world).view(2 * world, 3).to("xla") + index + step
            total, count = xm.all_reduce(xm.REDUCE_SUM, [x.t() * 2, torch.full((2,), index, device="xla")])
            parts = xm.all_gather(total.half().sin(), dim=1)
            own = xm.reduce_scatter(xm.REDUCE_MAX, parts.float().t().contiguous(), 1.0, 0, world)
            sent = xm.collective_permute(own, [[rank, (rank + 1) % world] for rank in range(world)])
            torch_xla.sync()
            whole = sum(torch.arange(6.0 * world).view(2 * world, 3).t() + rank + step for rank in range(world)) * 2
            rows = whole.half().sin().repeat(1, world).float().t().chunk(world)
            same(total, whole)
            assert count.tolist() == [world * (world - 1) // 2] * 2
            torch.testing.assert_close(sent.cpu(), rows[(index - 1) % world], rtol=0, atol=2e-3)
    runs = {name: (met.counter_value(name) or 0) - before[name] for name in before}
    assert (runs["UncompiledRun"] > 0) is (index > 0), runs


def steps(index: int, folder: str) -> None:
    """Optimizer steps, values of one process for all, functions of some, random numbers, and files."""
    world = xr.world_size()
    torch.manual_seed(index)  # other values in each process
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).to("xla")
    model[1].running_mean.fill_(index)
    xm.broadcast_master_param(model)
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    model.eval()
    for ours, theirs in zip(model.state_dict().values(), host.state_dict().values(), strict=True):
        assert torch.equal(ours.cpu(), theirs)
    optimizers = [torch.optim.AdamW(module.parameters(), lr=0.1) for module in (model, host)]
    batch = torch.randn(4 * world, 4)
    for _ in range(3):
        for module, optimizer, data in zip(
            (model, host), optimizers, (batch.chunk(world)[index].to("xla"), batch), strict=True
        ):
            optimizer.zero_grad()
            module(data).square().mean().backward()
            if module is model:
                xm.optimizer_step(optimizer, barrier=True)
            else:
                optimizer.step()
    for ours, theirs in zip(model.parameters(), host.parameters(), strict=True):
        same(ours, theirs)

    for groups, expected in ((None, (world - 1) / 2), ([[r] for r in reversed(range(world))], float(index))):
        for bucket in ("0", "1"):
            os.environ["ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB"] = bucket
            for param in model.parameters():
                param.grad = torch.full_like(param, index)
            xm.reduce_gradients(optimizers[0], groups=groups)
            assert all((param.grad == expected).all().item() for param in model.parameters())

    ran = xm.do_on_ordinals(lambda x: x.device.type, (model[0].weight,), ordinals=(world - 1,))
    assert ran == ("cpu" if index == world - 1 else None)
    value = {"rank": index, "x": torch.tensor([float(index)], device="xla")}
    assert xm.mesh_reduce("values", value, lambda result: [d["rank"] for d in result]) == list(range(world))

    # The same seed gives the same numbers; one of each process gives others; what one draws the others do not.
    torch.manual_seed(7)
    drawn = torch.rand(4, device="xla").tolist()
    assert xm.mesh_reduce("drawn", drawn, lambda result: all(each == result[0] for each in result))
    xm.set_rng_state(7 + index)
    assert (
        xm.mesh_reduce("own", torch.rand(4, device="xla").tolist(), lambda lists: len(set(map(tuple, lists)))) == world
    )
    if index == 0:
        torch.rand(2, device="xla")
    states = [torch.tensor([xm.get_rng_state()], device="xla")]
    xm.collective_broadcast(states)
    xm.set_rng_state(int(states[0]))
    assert xm.mesh_reduce("again", torch.rand(4, device="xla").tolist(), lambda result: result[0] == result[1])

    # A file of the first process, which calls alone; the others go on.
    if index == 0:
        xm.save({"w": model[0].weight, "sum": xm.REDUCE_SUM}, Path(folder) / "alone.pt")
    xm.rendezvous("saved")
    assert torch.equal(torch.load(Path(folder) / "alone.pt")["w"].cpu(), model[0].weight.detach().cpu())
    for number in range(2):
        data = {"w": [model[0].weight.detach() + number], "step": number}
        serialization.save(data, f"{folder}/folder")
        result = serialization.load(f"{folder}/folder")  # by all, once the first has written
        assert result["step"] == number and torch.equal(result["w"][0], data["w"][0].cpu())
        xm.rendezvous("loaded")
    serialization.save({"rank": torch.tensor(index, device="xla")}, f"{folder}/own{index}", master_only=False)
    assert int(serialization.load(f"{folder}/own{world - 1 - index}")["rank"]) == world - 1 - index
    assert sorted(os.listdir(folder)) == sorted(
        ["alone.pt", "folder", "folder.tensors", *(f"own{r}{end}" for r in range(world) for end in ("", ".tensors"))]
    )


class Slow(Dataset):
    """Takes a while for each sample, and says when."""

    def __init__(self, count: int, seconds: float) -> None:
        self.count, self.seconds = count, seconds

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return torch.tensor([float(number)])


def loaders(index: int) -> None:
    """Every sample in one process, once; and batches that come while a step runs."""
    world = xr.world_size()
    data = TensorDataset(torch.arange(24))
    sampler = DistributedSampler(data, world, index, shuffle=True, seed=3)
    loader = MpDeviceLoader(DataLoader(data, batch_size=4, sampler=sampler), "xla")
    orders = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        seen = [batch for (batch,) in loader]
        assert len(seen) == len(loader) == 24 // (4 * world) and all(b.device.type == "xla" for b in seen)
        own = torch.cat(seen).tolist()
        orders.append(own)
        assert sorted(xm.mesh_reduce(f"seen{epoch}", own, lambda result: sum(result, []))) == list(range(24))
    assert orders[0] != orders[1]

    def sharded() -> Iterator[torch.Tensor]:
        yield from (torch.tensor([n]) for n in range(24) if n % xr.world_size() == xr.global_ordinal())

    per_device = ParallelLoader(sharded(), [torch_xla.device()]).per_device_loader(torch_xla.device())
    total = torch.zeros(1, dtype=torch.int64, device="xla")
    for batch in per_device:
        total += xm.all_reduce(xm.REDUCE_SUM, batch)
    assert total.item() == sum(range(24))

    # Ten samples of 20 ms are read while steps take as long.
    slow = MpDeviceLoader(DataLoader(Slow(10, 0.02), batch_size=1), "xla")
    for batch in slow:
        xm.all_reduce(xm.REDUCE_SUM, batch)
    before = met.counter_value("UncachedCompile")
    start = time.monotonic()
    for batch in slow:
        time.sleep(0.02)
        xm.all_reduce(xm.REDUCE_SUM, batch)
    took = time.monotonic() - start
    assert met.counter_value("UncachedCompile") == before
    read = xm.mesh_reduce("took", took, max)
    assert read < 5 * 0.4, read


class Deadly:
    """Kills the process that pickles it."""

    def __reduce__(self) -> tuple[object, tuple[int, int]]:
        os.kill(os.getpid(), signal.SIGKILL)
        return str, ()


def killed_in_mid_save(index: int, folder: str, which: str) -> None:
    """Saves once, then is killed while a second save writes."""
    save = xm.save if which == "file.pt" else serialization.save
    values = torch.ones(4, device="xla")
    save({"x": values}, f"{folder}/{which}")
    save({"x": values * 2, "z": Deadly()}, f"{folder}/{which}")
