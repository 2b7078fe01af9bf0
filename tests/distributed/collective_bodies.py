"""What the processes of a job run in test_collectives.py; each raises where a value is not what the CPU gives."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import torch_xla  # noqa: F401
import torch_xla.distributed.xla_backend  # noqa: F401

OPS = {
    "SUM": lambda x: x.sum(0),
    "AVG": lambda x: x.sum(0) / len(x),
    "PRODUCT": lambda x: x.prod(0),
    "MIN": lambda x: x.amin(0),
    "MAX": lambda x: x.amax(0),
    "BAND": lambda x: _fold(torch.bitwise_and, x),
    "BOR": lambda x: _fold(torch.bitwise_or, x),
    "BXOR": lambda x: _fold(torch.bitwise_xor, x),
}
NEW = hasattr(dist, "all_gather_single")  # PyTorch 2.13 and later
gather_single = dist.all_gather_single if NEW else dist.all_gather_into_tensor
scatter_single = dist.reduce_scatter_single if NEW else dist.reduce_scatter_tensor


def _fold(fn: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    result = x[0]
    for other in x[1:]:
        result = fn(result, other)
    return result


def start(timeout: float = 60) -> tuple[int, int]:
    """Joins the group of all processes; gives the rank and how many there are."""
    dist.init_process_group("xla", init_method="xla://", timeout=datetime.timedelta(seconds=timeout))
    return dist.get_rank(), dist.get_world_size()


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What a process has; each can compute what the others have."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(0, 6, shape, generator=generator).to(dtype)


def same(ours: torch.Tensor, wanted: torch.Tensor, what: object = "") -> None:
    assert ours.shape == wanted.shape and ours.dtype == wanted.dtype, (what, ours.shape, ours.dtype, wanted)
    torch.testing.assert_close(ours.cpu(), wanted, msg=lambda text: f"{what}: {text}")


def reductions(index: int, device: str) -> None:
    """all_reduce, reduce, reduce_scatter in all their forms, kinds and types."""
    rank, size = start()
    kinds = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
    results: list[tuple[torch.Tensor, torch.Tensor, object]] = []
    for dtype in kinds if device == "xla" else kinds[:2] + kinds[3:5]:
        bits = not dtype.is_floating_point
        for name, fn in OPS.items():
            if name.startswith("B") != bits and not (bits and name in ("SUM", "MAX")):
                continue
            everything = torch.stack([values(r, (size, 3), dtype) for r in range(size)])
            expected = fn(everything).to(dtype)
            op = getattr(dist.ReduceOp, name)
            x = values(rank, (size, 3), dtype).to(device)
            dist.all_reduce(x, op=op)
            results.append((x, expected, ("all_reduce", name, dtype)))
            for root in range(size):
                x = values(rank, (size, 3), dtype).to(device)
                dist.reduce(x, root, op=op)
                if rank == root:
                    results.append((x, expected, ("reduce", name, dtype)))
            out = torch.empty(3, dtype=dtype, device=device)
            scatter_single(out, values(rank, (size, 3), dtype).to(device), op=op)
            results.append((out, expected[rank], ("reduce_scatter_single", name, dtype)))
            out = torch.empty(3, dtype=dtype, device=device)
            dist.reduce_scatter(out, list(values(rank, (size, 3), dtype).to(device)), op=op)
            results.append((out, expected[rank], ("reduce_scatter", name, dtype)))
    # Sums of multiples, lists, and work that is waited for later.
    everything = torch.stack([values(r, (4, 2)) for r in range(size)])
    x = values(rank, (4, 2)).to(device)
    dist.all_reduce(x, op=dist._make_nccl_premul_sum(0.5))
    results.append((x, everything.sum(0) * 0.5, "premul"))
    pair = [values(rank, (4, 2)).to(device), values(rank, (3,)).to(device)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in pair:
            dist.all_reduce(tensor)
    manager.wait()
    results.append((pair[0], everything.sum(0), "coalesced"))
    results.append((pair[1], sum(values(r, (3,)) for r in range(size)), "coalesced"))
    x = values(rank, (4, 2)).to(device)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert work.is_completed()
    results.append((x, everything.sum(0), "async"))
    # Parts of several sizes.
    parts = [values(rank, (r + 1, 2)).to(device) for r in range(size)]
    out = torch.empty(rank + 1, 2, device=device)
    dist.reduce_scatter(out, parts)
    results.append((out, sum(values(r, (rank + 1, 2)) for r in range(size)), "uneven reduce_scatter"))
    outs = [torch.empty(2, device=device) for _ in range(2)]
    with dist._coalescing_manager():
        for out in outs:
            scatter_single(out, values(rank, (2 * size,)).to(device))
    expected = sum(values(r, (2 * size,)) for r in range(size)).view(size, 2)[rank]
    results += [(out, expected, "coalesced reduce_scatter") for out in outs]
    torch_xla.sync()
    for actual, expected, what in results:
        same(actual, expected, (rank, device, what))


def movements(index: int, device: str) -> None:
    """What gathers, scatters, exchanges and hands out."""
    rank, size = start()
    results: list[tuple[torch.Tensor, torch.Tensor, object]] = []

    def expect(actual: Any, expected: Any, what: object) -> None:
        results.extend((f, w, what) for f, w in zip(actual, expected, strict=True))

    mine, all_of_them = values(rank, (2, 3)), [values(r, (2, 3)) for r in range(size)]

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    outs = [empty(2, 3) for _ in range(size)]
    dist.all_gather(outs, mine.to(device))
    expect(outs, all_of_them, "all_gather")
    for dtype in (torch.bool, torch.complex64, torch.float16, torch.int16) if device == "xla" else (torch.int32,):
        outs = [empty(2, 3, dtype=dtype) for _ in range(size)]
        dist.all_gather(outs, mine.to(dtype).to(device))
        expect(outs, [v.to(dtype) for v in all_of_them], dtype)
    outs = [empty(r + 1, 2) for r in range(size)]
    dist.all_gather(outs, values(rank, (rank + 1, 2)).to(device))
    expect(outs, [values(r, (r + 1, 2)) for r in range(size)], "uneven all_gather")
    for out, expected in ((empty(2 * size, 3), torch.cat(all_of_them)), (empty(size, 2, 3), torch.stack(all_of_them))):
        gather_single(out, mine.to(device))
        expect([out], [expected], "all_gather_single")
    outs = [empty(2 * size, 3), empty(2 * size, 3)]
    with dist._coalescing_manager():
        for out in outs:
            gather_single(out, mine.to(device))
    expect(outs, [torch.cat(all_of_them)] * 2, "coalesced all_gather")
    for root in range(size):
        x = mine.clone().to(device)
        dist.broadcast(x, root)
        expect([x], [all_of_them[root]], "broadcast")
        outs = [empty(2, 3) for _ in range(size)]
        dist.gather(mine.to(device), outs if rank == root else None, dst=root)
        if rank == root:
            expect(outs, all_of_them, "gather")
        x = empty(3)
        dist.scatter(x, [values(r, (3,)).to(device) for r in range(size)] if rank == root else None, src=root)
        expect([x], [values(rank, (3,))], "scatter")
    out = empty(size, 3)
    dist.all_to_all_single(out, values(rank, (size, 3)).to(device))
    expect([out], [torch.stack([values(r, (size, 3))[rank] for r in range(size)])], "all_to_all_single")
    outs = [empty(3) for _ in range(size)]
    dist.all_to_all(outs, list(values(rank, (size, 3)).to(device)))
    expect(outs, [values(r, (size, 3))[rank] for r in range(size)], "all_to_all")
    # Process r sends 1 + (r + t) % size rows to process t.
    sizes = [[1 + (r + t) % size for t in range(size)] for r in range(size)]
    sent = [values(r, (sum(sizes[r]), 2)).split(sizes[r]) for r in range(size)]
    taken = [sizes[r][rank] for r in range(size)]
    out = empty(sum(taken), 2)
    dist.all_to_all_single(out, torch.cat(sent[rank]).to(device), taken, sizes[rank])
    expect([out], [torch.cat([sent[r][rank] for r in range(size)])], "uneven all_to_all_single")
    outs = [empty(count, 2) for count in taken]
    dist.all_to_all(outs, [part.to(device) for part in sent[rank]])
    expect(outs, [sent[r][rank] for r in range(size)], "uneven all_to_all")
    torch_xla.sync()
    for actual, expected, what in results:
        same(actual, expected, (rank, device, what))


def point_to_point(index: int, device: str) -> None:
    """Sends and receives, also batched in any order and from anybody, with other collectives pending."""
    rank, size = start()
    after, before = (rank + 1) % size, (rank - 1) % size
    pending = torch.ones(2, device=device)
    dist.all_reduce(pending)
    x, out = values(rank, (2, 3)).to(device), torch.zeros(2, 3, device=device)
    if rank % 2 == 0:
        dist.send(x, after)
        assert dist.recv(out, before) == before
    else:
        assert dist.recv(out, before) == before
        dist.send(x, after)
    same(out, values(before, (2, 3)), "send and recv")
    out = torch.zeros(2, 3, device=device)
    works = [dist.irecv(out, before, tag=1), dist.isend(x + 1, after, tag=1)]
    for work in works:
        work.wait()
    same(out, values(before, (2, 3)) + 1, "isend and irecv")
    outs = [torch.zeros(2, 3, device=device) for _ in range(2)]
    ops = [
        dist.P2POp(dist.irecv, outs[0], before),
        dist.P2POp(dist.isend, x * 2, after),
        dist.P2POp(dist.isend, x * 3, after),
        dist.P2POp(dist.irecv, outs[1], before),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    for factor, out in zip((2, 3), outs, strict=True):
        same(out, values(before, (2, 3)) * factor, "batch")
    same(pending, torch.full((2,), float(size)), "pending")
    if rank == 0:
        senders = set()
        for _ in range(size - 1):
            out = torch.zeros(2, 3, device=device)
            sender = dist.recv(out)
            same(out, values(sender, (2, 3)), "from anybody")
            senders.add(sender)
        assert senders == set(range(1, size))
    else:
        dist.send(x, 0)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    shared = [rank, str(rank)] if rank == size - 1 else [None, None]
    dist.broadcast_object_list(shared, src=size - 1)
    assert shared == [size - 1, str(size - 1)]
    gathered = [None] * size if rank == 1 else None
    dist.gather_object(rank * 10, gathered, dst=1)
    assert gathered == ([r * 10 for r in range(size)] if rank == 1 else None)
    handed: list[Any] = [None]
    dist.scatter_object_list(handed, [f"to {r}" for r in range(size)] if rank == 0 else None, src=0)
    assert handed == [f"to {rank}"]
    if rank == 0:
        dist.send_object_list(["a", 1], dst=1)
    if rank == 1:
        got: list[Any] = [None, None]
        dist.recv_object_list(got, src=0)
        assert got == ["a", 1]


def groups(index: int) -> None:
    """Groups of some processes, in any order, of one, and reads, barriers and ends that only some come to."""
    rank, size = start()
    x = torch.full((2,), float(rank), device="xla")
    if rank == 0:  # reads before the others do, who then wait for it elsewhere
        total = x.clone()
        dist.all_reduce(total)
        assert total.tolist() == [size * (size - 1) / 2] * 2
    else:
        dist.all_reduce(x.clone())
    reverse = dist.new_group(list(reversed(range(size))))
    assert dist.get_rank(reverse) == size - 1 - rank or dist.get_process_group_ranks(reverse) == list(range(size))
    alone = [dist.new_group([r]) for r in range(size)][rank]
    pairs = [[r for r in range(size) if r % 2 == k] for k in range(2)]
    made = [dist.new_group(ranks) for ranks in pairs]
    mine, members = made[rank % 2], pairs[rank % 2]
    assert dist.get_process_group_ranks(mine) == members
    assert made[1 - rank % 2] is dist.GroupMember.NON_GROUP_MEMBER
    for device in ("xla", "cpu"):
        part = torch.full((2,), float(rank), device=device)
        dist.all_reduce(part, group=mine)
        same(part, torch.full((2,), float(sum(members))), "in a part")
        part = torch.full((2,), float(rank), device=device)
        dist.all_reduce(part, group=alone)
        same(part, torch.full((2,), float(rank)), "alone")
        part = torch.zeros(3, 2, device=device)
        scatter_single(part, torch.full((3, 2), float(rank), device=device), group=alone)
        same(part, torch.full((3, 2), float(rank)), "scattered alone")
        outs = [torch.zeros(2, device=device) for _ in range(size)]
        dist.all_gather(outs, torch.full((2,), float(rank), device=device), group=reverse)
        order = dist.get_process_group_ranks(reverse)
        for place, out in enumerate(outs):
            same(out, torch.full((2,), float(order[place])), "reversed")
        part = torch.full((2,), float(rank), device=device)
        dist.broadcast(part, members[-1], group=mine)
        same(part, torch.full((2,), float(members[-1])), "from the last of a part")
    if rank == 0:
        later = torch.ones(2, device="xla")
        dist.all_reduce(later)
        assert later.tolist() == [size] * 2  # only here: the others go on to objects over the host
    else:
        dist.all_reduce(torch.ones(2, device="xla"))
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, rank)
    assert objects == list(range(size))
    dist.barrier()
    dist.barrier(group=mine)
    last = torch.ones(2, device="xla")
    dist.all_reduce(last)
    if rank == 0:  # the others have nothing more to do
        assert last.tolist() == [size] * 2


def elsewhere(index: int) -> None:
    """One process reads a sum before it joins the others, who make a group that they are not in."""
    rank, size = start()
    x = torch.ones(2, device="xla")
    dist.all_reduce(x)
    if rank == 0:
        assert x.tolist() == [size] * 2
    dist.new_group([0])
    assert x.tolist() == [size] * 2


def abandoned(index: int, way: str) -> None:
    """The last process ends while the others wait for it in something over the host."""
    rank, size = start()
    dist.barrier()
    if rank == size - 1:
        return
    begin = time.monotonic()
    try:
        if way == "all_reduce":
            dist.all_reduce(torch.ones(2))
        elif way == "recv":
            dist.recv(torch.ones(2, device="xla"), size - 1)
        else:
            dist.all_gather_object([None] * size, rank)
    except RuntimeError as error:
        assert f"rank {size - 1} has ended (its program was over)" in str(error), error
        assert time.monotonic() - begin < 20
        return
    raise AssertionError("nothing was raised")
