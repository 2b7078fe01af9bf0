"""Every collective of `xm`, by kind, dtype and layout of groups, in a process of a job, against NumPy."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)
REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": np.add.reduce,
    "mul": np.multiply.reduce,
    "min": np.minimum.reduce,
    "max": np.maximum.reduce,
    "and": np.bitwise_and.reduce,
    "or": np.bitwise_or.reduce,
}

Groups = list[list[int]]
Case = tuple[str, Callable[[], torch.Tensor], torch.Tensor]


def layouts(world: int) -> list[Groups | None]:
    """All, reversed, singletons, and with four processes pairs and groups of two sizes."""
    actual: list[Groups | None] = [None, [list(reversed(range(world)))], [[rank] for rank in range(world)]]
    return actual + ([[[0, 2], [3, 1]], [[2], [3, 0, 1]]] if world == 4 else [])


def values(rank: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """What a process has: whole numbers, which every dtype holds exactly, sums and products of them too."""
    flat = (torch.arange(int(np.prod(shape))) * 3 + rank * 5 + 1) % 4
    return flat.reshape(tuple(shape)).to(dtype)


def _reduced(parts: list[torch.Tensor], reduction: str) -> torch.Tensor:
    dtype = parts[0].dtype
    if dtype == torch.bool:
        reduction = {"sum": "or", "mul": "and", "min": "and", "max": "or"}.get(reduction, reduction)
    wide = np.stack([p.numpy() if dtype == torch.bool else p.to(torch.float64).numpy() for p in parts])
    if reduction in ("and", "or") and dtype != torch.bool:
        wide = wide.astype(np.int64)
    return torch.from_numpy(np.asarray(REDUCTIONS[reduction](wide, axis=0))).to(dtype)


def cases(world: int, rank: int, groups: Groups | None, dtype: torch.dtype) -> Iterator[Case]:
    """(name, what the collective gives, what it should give) in the order of all processes."""
    group = next(g for g in groups or [list(range(world))] if rank in g)
    size, place = len(group), group.index(rank)

    def on_device(shape: Sequence[int]) -> torch.Tensor:
        return values(rank, shape, dtype).to("xla")

    def of_all(shape: Sequence[int]) -> list[torch.Tensor]:
        return [values(member, shape, dtype) for member in group]

    for reduction in REDUCTIONS:
        if reduction in ("and", "or") and dtype.is_floating_point:
            continue
        yield (
            f"all_reduce {reduction}",
            lambda reduction=reduction: xm.all_reduce(reduction, on_device((3, 5)), groups=groups),
            _reduced(of_all((3, 5)), reduction),
        )
        shape = (2 * size, 3)
        yield (
            f"reduce_scatter {reduction}",
            lambda reduction=reduction, shape=shape: xm.reduce_scatter(
                reduction, on_device(shape), 1.0, 0, size, groups=groups
            ),
            _reduced([part.chunk(size)[place] for part in of_all(shape)], reduction),
        )
    for dim in (0, -1):
        yield (
            f"all_gather {dim}",
            lambda dim=dim: xm.all_gather(on_device((2, 3)), dim, groups=groups),
            torch.cat(of_all((2, 3)), dim),
        )
    shape = (2 * size, 4)
    yield (
        "all_to_all",
        lambda: xm.all_to_all(on_device(shape), 0, 1, size, groups=groups),
        torch.cat([part.chunk(size)[place] for part in of_all(shape)], 1),
    )


def whole_job(world: int, rank: int, dtype: torch.dtype) -> Iterator[Case]:
    """Those that all processes take part in."""

    def on_device() -> torch.Tensor:
        return values(rank, (4,), dtype).to("xla")

    def broadcast() -> torch.Tensor:
        tensors = [on_device(), on_device()[:2].clone()]
        xm.collective_broadcast(tensors, world - 1)
        return torch.cat(tensors)

    last = values(world - 1, (4,), dtype)
    yield "broadcast", broadcast, torch.cat([last, last[:2]])
    ring = [[i, (i + 1) % world] for i in range(world)]
    yield "permute ring", lambda: xm.collective_permute(on_device(), ring), values((rank - 1) % world, (4,), dtype)
    received = values(0, (4,), dtype) if rank == 1 else torch.zeros(4, dtype=dtype)
    yield "permute pair", lambda: xm.collective_permute(on_device(), [[0, 1]]), received

    def in_place() -> torch.Tensor:
        x, y = on_device(), on_device().reshape(2, 2)
        x.add_(x)  # a write before a collective is in it
        xm.all_reduce("max", [x, y])
        return torch.cat([x, y.flatten()])

    doubled = [values(r, (4,), dtype) + values(r, (4,), dtype) for r in range(world)]
    plain = [values(r, (4,), dtype) for r in range(world)]
    yield "in place", in_place, torch.cat([_reduced(doubled, "max"), _reduced(plain, "max")])


def run(rank: int, folder: str) -> None:
    """Checks all of it, in one graph per layout and dtype, and writes down what differs."""
    world = xr.world_size()
    wrong, count = [], 0
    for dtype in DTYPES:
        for groups in [*layouts(world), "job"]:
            made = whole_job(world, rank, dtype) if groups == "job" else cases(world, rank, groups, dtype)
            actual = [(name, give(), expected) for name, give, expected in made]
            torch_xla.sync()
            for name, ours, expected in actual:
                count += 1
                if ours.dtype != dtype or not torch.equal(ours.cpu(), expected):
                    wrong.append(f"{name} {dtype} {groups}: {ours.tolist()}, expected {expected.tolist()}")
    Path(folder, f"{rank}.json").write_text(json.dumps([count, wrong]))


def results(folder: Path, world: int) -> tuple[int, list[str]]:
    """How many were checked, and what differed, in all processes."""
    actual = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]
    return sum(count for count, _ in actual), list(itertools.chain.from_iterable(wrong for _, wrong in actual))
