"""What the processes of a job run in test_training.py; each raises where it does not train as one process does."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from collective_bodies import start
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import torch_xla

STEPS, BATCH = 3, 8


class Net(nn.Module):
    """Layers with a normalization, a buffer and an uneven number of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.norm = nn.LayerNorm(7)
        self.second = nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.norm(self.first(x))))


def net() -> nn.Module:
    torch.manual_seed(1)
    return Net()


def batches(steps: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(BATCH, 5, generator=generator), torch.randint(0, 3, (BATCH,), generator=generator))
        for _ in range(steps)
    ]


def alone(
    steps: int = STEPS, make: Callable[..., torch.optim.Optimizer] = torch.optim.Adam
) -> tuple[nn.Module, list[float]]:
    """The model that one process on the CPU trains, and its losses."""
    model = net()
    optimizer = make(model.parameters(), lr=0.05)
    losses = []
    for x, y in batches(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def shares(rank: int, size: int, steps: int = STEPS) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """A process's part of each batch."""
    for x, y in batches(steps):
        yield x.chunk(size)[rank].to("xla"), y.chunk(size)[rank].to("xla")


def close(ours: torch.Tensor, wanted: torch.Tensor, what: object = "") -> None:
    torch.testing.assert_close(ours.cpu(), wanted.cpu(), rtol=1e-4, atol=1e-5, msg=lambda text: f"{what}: {text}")


def same_state(ours: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert list(ours) == list(wanted)
    for name, value in wanted.items():
        close(ours[name], value, name)


def mean(loss: torch.Tensor) -> torch.Tensor:
    total = loss.detach().clone()
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    return total


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int) -> Iterator[torch.Tensor]:
    """Trains on this process's shares; gives the loss of the whole batch after each step."""
    for x, y in shares(rank, size):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        whole = mean(loss)
        torch_xla.sync()
        yield whole


def captured(index: int) -> None:
    """Steps that are captured and replayed: gradients reduced by DistributedDataParallel, and one by one."""
    rank, size = start()
    steps = 7
    _, losses = alone(steps)
    for wraps in (False, True):
        model = net().to("xla")
        inner = DistributedDataParallel(model) if wraps else model
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05, capturable=True)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()  # noqa: B023
            loss = F.cross_entropy(inner(x), y)  # noqa: B023
            loss.backward()
            if not wraps:  # noqa: B023
                for p in model.parameters():  # noqa: B023
                    dist.all_reduce(p.grad, op=dist.ReduceOp.AVG)
            optimizer.step()  # noqa: B023
            return mean(loss)

        graph = None
        for i, ((x, y), expected) in enumerate(zip(shares(rank, size, steps), losses, strict=True)):
            if i < 3:
                whole = step(x, y)
            elif graph is None:
                graph, static = torch_xla.Graph(), (x.clone(), y.clone())
                with graph:
                    whole = step(*static)
            if graph is not None:
                for one, other in zip(static, (x, y), strict=True):
                    one.copy_(other)
                graph.replay()
            if rank == 0:  # read by one alone
                assert abs(whole.item() - expected) < 1e-4


def ddp(index: int) -> None:
    """DistributedDataParallel: training, gradients that are added up, buckets, uneven inputs, evaluation."""
    rank, size = start()
    expected, losses = alone()
    for options in ({}, {"gradient_as_bucket_view": True, "find_unused_parameters": True}):
        model = DistributedDataParallel(net().to("xla"), **options)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for whole, loss_wanted in zip(trained(model, optimizer, rank, size), losses, strict=True):
            if rank == 0:  # read by one alone
                assert abs(whole.item() - loss_wanted) < 1e-4
        same_state(model.module.state_dict(), expected.state_dict())

    # Two halves of a share, of which only the second is reduced.
    model = DistributedDataParallel(net().to("xla"), gradient_as_bucket_view=True)
    for x, y in shares(rank, size, 1):
        for part, (a, b) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
            if part == 0:
                with model.no_sync():
                    (F.cross_entropy(model(a), b) / 2).backward()
                local = model.module.first.weight.grad.clone()
            else:
                (F.cross_entropy(model(a), b) / 2).backward()
    plain = net()
    x, y = batches(1)[0]
    F.cross_entropy(plain(x), y).backward()
    for ours, theirs in zip(model.module.parameters(), plain.parameters(), strict=True):
        close(ours.grad, theirs.grad, "no_sync")
    grads = [torch.zeros_like(local) for _ in range(size)]
    dist.all_gather(grads, local)
    assert not torch.equal(grads[0].cpu(), grads[1].cpu())  # it was its own
    # The process of rank r has r + 1 batches.
    model = DistributedDataParallel(net().to("xla"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with model.join():
        for x, y in list(shares(rank, size))[: rank + 1]:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            torch_xla.sync()
    plain = net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05)
    for step, (x, y) in enumerate(batches()[:size]):
        optimizer.zero_grad()
        parts = zip(x.chunk(size)[step:], y.chunk(size)[step:], strict=True)
        (sum(F.cross_entropy(plain(a), b) for a, b in parts) / size).backward()
        optimizer.step()
    same_state(model.module.state_dict(), plain.state_dict())
    model.eval()
    with torch.no_grad():
        close(model(batches()[0][0].to("xla")), plain(batches()[0][0]), "evaluation")


def whole_steps(index: int) -> None:
    """DistributedDataParallel in regions that may read nothing; it makes its buckets anew in the second step."""
    rank, size = start()
    _, losses = alone()
    model = DistributedDataParallel(net().to("xla"), gradient_as_bucket_view=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    @torch_xla.compile(full_graph=True)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return mean(loss)

    for (x, y), expected in zip(shares(rank, size), losses, strict=True):
        close(step(x, y), torch.tensor(expected), "loss")


def mesh(index: int) -> None:
    """A mesh of processes: its groups, coordinates, parts, and that it is one of SPMD's no more."""
    rank, size = start()
    whole = init_device_mesh("xla", (2, size // 2), mesh_dim_names=("dp", "tp"))
    assert list(whole.get_coordinate()) == [rank // (size // 2), rank % (size // 2)]
    assert whole.device_type == "xla" and type(whole.device_type) is str
    assert (whole["dp"].get_local_rank(), whole.get_local_rank("tp")) == (rank // (size // 2), rank % (size // 2))
    x = torch.full((2,), float(rank), device="xla")
    dist.all_reduce(x, group=whole["dp"].get_group())
    other = sum(r for r in range(size) if r % (size // 2) == rank % (size // 2))
    assert x.tolist() == [other] * 2
    flat = whole._flatten()
    x = torch.full((2,), float(rank), device="xla")
    dist.all_reduce(x, group=flat.get_group())
    assert x.tolist() == [sum(range(size))] * 2
    assert dist.get_process_group_ranks(whole.get_group("tp")) == [
        r for r in range(size) if r // (size // 2) == rank // (size // 2)
    ]


def sharded(index: int, folder: str) -> None:
    """fully_shard: training, mixed precision, clipped gradients, whole state, and a checkpoint."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import DTensor

    rank, size = start()
    reference, losses = alone()
    devices = init_device_mesh("xla", (size,))
    model = net().to("xla")
    for layer in (model.first, model.second):
        fully_shard(layer, mesh=devices)
    fully_shard(model, mesh=devices)
    assert isinstance(model.first.weight, DTensor) and model.first.weight.to_local().size(0) < 7
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for whole, loss_wanted in zip(trained(model, optimizer, rank, size), losses, strict=True):
        close(whole, torch.tensor(loss_wanted), "loss")
    same_state({name: value.full_tensor() for name, value in model.state_dict().items()}, reference.state_dict())
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)

    half = net().to("xla")
    fully_shard(half, mesh=devices, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    x, y = next(shares(rank, size))
    out = half(x)
    assert out.dtype == torch.bfloat16
    F.cross_entropy(out.float(), y).backward()
    norm = nn.utils.clip_grad_norm_(half.parameters(), 0.1)
    plain = net()
    F.cross_entropy(plain(batches()[0][0]), batches()[0][1]).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(norm.full_tensor().cpu(), expected, rtol=0.05, atol=0.01)


def fully_sharded_modules(index: int) -> None:
    """FullyShardedDataParallel, which PyTorch had before fully_shard, with its state whole and in a checkpoint."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    rank, size = start()
    expected, losses = alone()
    states = []
    for options in ({}, {"use_orig_params": True, "sync_module_states": True}):
        model = FullyShardedDataParallel(net().to("xla"), device_id=torch.device("xla:0"), **options)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        for whole, loss_wanted in zip(trained(model, optimizer, rank, size), losses, strict=True):
            close(whole, torch.tensor(loss_wanted), "loss")
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            same_state(model.state_dict(), expected.state_dict())
            state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state)
        states.append(state["state"])
    assert states[0].keys() == {name for name, _ in expected.named_parameters()}
    for name, kept in states[0].items():
        close(kept["exp_avg"], states[1][name]["exp_avg"], name)


def state_from_rank_0(index: int, folder: str) -> None:
    """A whole state that one process has and gives to the others, and a checkpoint that is written meanwhile."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    rank, size = start()
    model = net().to("xla")
    fully_shard(model, mesh=init_device_mesh("xla", (size,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in trained(model, optimizer, rank, size):
        pass
    whole = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    model.zero_grad()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, optimizer, whole if rank == 0 else {}, options=options)
    given = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        for name, kept in whole["state"].items():
            close(given["state"][name]["exp_avg"], kept["exp_avg"], name)
    state = get_model_state_dict(model)
    dcp.async_save(state, checkpoint_id=folder).result()
    expected = {name: value.full_tensor().cpu() for name, value in state.items()}
    with torch.no_grad():
        for value in state.values():
            value.zero_()
    dcp.load(state, checkpoint_id=folder)
    same_state({name: value.full_tensor() for name, value in state.items()}, expected)


def resume(index: int, folder: str) -> None:
    """The checkpoint of another number of processes, trained on."""
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    rank, size = start()
    expected, _ = alone(STEPS + 1)
    model = net().to("xla")
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    fully_shard(model, mesh=init_device_mesh("xla", (size,)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    *_, (x, y) = shares(rank, size, STEPS + 1)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    same_state({name: value.full_tensor() for name, value in model.state_dict().items()}, expected.state_dict())


def split_optimizers(index: int) -> None:
    """Both optimizers whose state is split: this package's, also in groups and loaded again, and PyTorch's."""
    from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

    from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

    rank, size = start()
    plain = net()
    reference = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    norms = []
    for x, y in batches():
        reference.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.3))
        reference.step()

    model = net().to("xla")
    options: dict[str, Any] = {"max_norm": 0.3, "lr": 0.05, "momentum": 0.9, "save_master_weights": True}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **options)
    state: dict[str, Any] = {}
    for step, (x, y) in enumerate(shares(rank, size)):
        if step == STEPS - 1:  # in another optimizer, of another model, from what was kept
            state = copy.deepcopy(optimizer.state_dict())
            model = net().to("xla")
            optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, **options)
            optimizer.load_state_dict(state)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        torch_xla.sync()
        close(optimizer.grad_norm, norms[step], "norm")
        assert optimizer.base_optimizer.param_groups[0]["params"][0].size(0) == -(-7 // size)
    same_state(model.state_dict(), plain.state_dict())

    # A half of a model's state each, in groups of one: as if each process were alone.
    x, y = next(shares(rank, size, 1))
    model, alone_model = net().to("xla"), net()
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.SGD, lr=0.1, sharding_groups=[[r] for r in range(size)], grad_clipping=False
    )
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    reference_step = torch.optim.SGD(alone_model.parameters(), lr=0.1)
    F.cross_entropy(alone_model(x.cpu()), y.cpu()).backward()
    reference_step.step()
    same_state(model.state_dict(), alone_model.state_dict())

    expected, _ = alone(make=partial(torch.optim.SGD, momentum=0.9))
    parallel = DistributedDataParallel(net().to("xla"))
    split = TorchZero(parallel.parameters(), torch.optim.SGD, lr=0.05, momentum=0.9)
    for x, y in shares(rank, size):
        split.zero_grad()
        F.cross_entropy(parallel(x), y).backward()
        split.step()
        torch_xla.sync()
    same_state(parallel.module.state_dict(), expected.state_dict())
    split.consolidate_state_dict(to=0)
    if rank == 0:
        assert len(split.state_dict()["state"]) == 6


def compiled_ddp(index: int) -> None:
    """A compiled model whose gradients C++ has reduced while the compiler's frames are on the stack."""
    start()
    for net in (nn.Linear(4, 2), nn.BatchNorm1d(4)):
        torch._dynamo.reset()
        host, model = copy.deepcopy(net), DistributedDataParallel(net.to("xla"))
        compiled = torch.compile(model, backend="openxla")
        for _ in range(2):
            x = torch.arange(12.0).view(3, 4).sin()
            for run, value in ((compiled, x.to("xla")), (host, x)):
                run(value).square().sum().backward()
        for name, param in host.named_parameters():
            result = model.module.get_parameter(name).grad
            torch.testing.assert_close(result.cpu(), param.grad, rtol=1e-4, atol=1e-4)
