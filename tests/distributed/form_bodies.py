"""What test_forms.py runs in the processes of a job: what PyTorch's interfaces take beside the plainest call."""

from __future__ import annotations

import datetime
import io
import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import torch_xla
import torch_xla.distributed.xla_backend  # noqa: F401

LIMIT = datetime.timedelta(seconds=30)


def grid(device: str) -> torch.Tensor:
    """Values that differ everywhere, in a tensor that is not contiguous."""
    return torch.arange(6.0).view(2, 3).to(device).t()


def collectives(index: int) -> None:
    """Strided tensors, handles that are waited for with a limit, messages in compiled functions."""
    dist.init_process_group("xla")
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    for device in ("xla", "cpu"):
        # Messages, in either direction, of strided tensors into strided tensors.
        for sender in (0, 1):
            if rank == sender:
                dist.send(grid(device), other)
                assert dist.isend(grid(device)[1], other).wait(LIMIT)
            else:
                whole, row = torch.zeros_like(grid(device)), torch.zeros(2, 2, device=device)[:, 1]
                dist.recv(whole, other)
                assert dist.irecv(row, other).wait(LIMIT)
                assert torch.equal(whole.cpu(), grid("cpu")) and torch.equal(row.cpu(), grid("cpu")[1])
        works = [
            dist.P2POp(dist.isend, grid(device) + rank, other),
            dist.P2POp(dist.irecv, received := torch.zeros_like(grid(device)), other),
        ]
        assert all(work.wait(LIMIT) for work in dist.batch_isend_irecv(works))
        assert torch.equal(received.cpu(), grid("cpu") + other)

        def new(*shape: int, device: str = device) -> torch.Tensor:
            return torch.ones(shape, device=device)

        for start in (
            lambda: dist.all_reduce(new(2), async_op=True),
            lambda: dist.broadcast(new(2), 0, async_op=True),
            lambda: dist.reduce(new(2), 0, async_op=True),
            lambda: dist.all_gather([new(2), new(2)], new(2), async_op=True),
            lambda: dist.all_gather_into_tensor(new(4), new(2), async_op=True),
            lambda: dist.reduce_scatter_tensor(new(2), new(4), async_op=True),
            lambda: dist.all_to_all_single(new(2), new(2), async_op=True),
            lambda: dist.gather(new(2), [new(2), new(2)] if rank == 0 else None, async_op=True),
            lambda: dist.scatter(new(2), [new(2), new(2)] if rank == 0 else None, async_op=True),
            lambda: dist.barrier(async_op=True),
        ):
            work = start()
            assert work.wait(LIMIT) and work.is_completed()
            work.synchronize()
        reduced = new(2)
        dist.all_reduce(reduced, async_op=True).get_future().wait()
        assert reduced.tolist() == [2, 2]

    def exchange(t: torch.Tensor) -> torch.Tensor:
        t = t * 2
        if rank == 0:
            dist.send(t, 1)
        else:
            dist.recv(t, 0)
        return t + 1

    def at_once(t: torch.Tensor) -> torch.Tensor:
        t = t * 2
        into = torch.empty_like(t)
        works = [dist.isend(t, other), dist.irecv(into, other)]
        for work in works:
            work.wait()
        return into + 1

    for function, expected in ((exchange, [7, 7]), (at_once, [9 - 2 * rank] * 2)):
        for device in ("xla", "cpu"):
            compiled = torch.compile(function, backend="openxla" if device == "xla" else "eager")
            assert compiled(torch.full((2,), 3.0 + rank, device=device)).tolist() == expected, (function, device)


def norms(index: int) -> None:
    """`norm` of distributed tensors, which PyTorch computes otherwise on devices it does not list; a host's mesh."""
    dist.init_process_group("xla")
    host = torch.arange(1.0, 9).view(4, 2)
    for placement in (Shard(0), Shard(1), Replicate()):
        t = distribute_tensor(host.to("xla"), init_device_mesh("xla", (2,)), [placement])
        for norm in (
            torch.norm,
            lambda x: x.norm(1),
            lambda x: x.norm(float("inf")),
            lambda x: torch.norm(x, dim=0),
            lambda x: torch.norm(x, 3, dim=1, keepdim=True),
            lambda x: torch.norm(x, dim=(0, 1)),
            lambda x: torch.linalg.vector_norm(x),
            lambda x: torch.linalg.vector_norm(x, dim=()),
            lambda x: x.sum(dim=()),
        ):
            torch.testing.assert_close(norm(t).full_tensor().cpu(), norm(host))
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("torch_xla.device_mesh").addHandler(handler)
    for _ in range(2):
        init_device_mesh("cpu", (2,))
    assert len(told) == 1 and "use_as_accelerator()" in told[0], told


class Uneven(torch.nn.Module):
    """Parameters of which one process has no part."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.arange(3.0).view(1, 3))
        self.second = torch.nn.Parameter(torch.arange(8.0).view(4, 2))


def empty_shards(index: int, folder: str) -> None:
    """A process saves and loads its own parts, also empty ones, and all save and load one checkpoint."""
    dist.init_process_group("xla")
    mesh = init_device_mesh("xla", (2,))
    module, other = (fully_shard(Uneven().to("xla"), mesh=mesh) for _ in range(2))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3)
    expected = {name: value.to_local().cpu() for name, value in module.state_dict().items()}
    assert expected["first"].numel() == (0 if index else 3)
    for state in (module.state_dict(), {name: value.to_local() for name, value in module.state_dict().items()}):
        for zip_file in (True, False):
            file = io.BytesIO()
            torch.save(state, file, _use_new_zipfile_serialization=zip_file)
            for place in (None, "xla", "cpu", f"xla:{index}"):
                for weights_only in (True, False):
                    file.seek(0)
                    loaded = torch.load(file, map_location=place, weights_only=weights_only)
                    for name, value in loaded.items():
                        local = value.to_local() if hasattr(value, "to_local") else value
                        assert local.device.type == ("cpu" if place == "cpu" else "xla"), (name, place)
                        assert torch.equal(local.cpu(), expected[name]), (name, place, zip_file)
    checkpoint.save(module.state_dict(), checkpoint_id=Path(folder))
    state = other.state_dict()
    checkpoint.load(state, checkpoint_id=Path(folder))
    other.load_state_dict(state)
    for name, value in other.state_dict().items():
        assert torch.equal(value.to_local().cpu(), expected[name])
    torch_xla.sync()
