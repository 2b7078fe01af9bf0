"""What the processes of test_starting.py run, in a module that their scripts import."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr

TURN = xmp.MpSerialExecutor()


def place(index: int) -> dict[str, Any]:
    """What this process is told about itself, and what all of the job make together."""
    total = xm.all_reduce("sum", torch.ones(2, device="xla") * (xr.global_ordinal() + 1))
    return {
        "index": index,
        "ordinal": xr.global_ordinal(),
        "local": xr.local_ordinal(),
        "world": xr.world_size(),
        "old": [xm.get_ordinal(), xm.get_local_ordinal(), xm.xrt_world_size(), xm.is_master_ordinal()],
        "processes": [xr.process_index(), xr.process_count(), xr.local_process_count()],
        "devices": [xr.addressable_device_count(), xr.global_device_count(), str(xm.xla_device())],
        "environment": [os.environ[name] for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "RANK", "WORLD_SIZE")],
        "sum": total.tolist(),
    }


def expected(rank: int, world: int, local_world: int) -> dict[str, Any]:
    local = rank % local_world
    return {
        "index": rank,
        "ordinal": rank,
        "local": local,
        "world": world,
        "old": [rank, local, world, local == 0],
        "processes": [rank, world, local_world],
        "devices": [1, world, "xla:0"],
        "environment": [str(local), str(local_world), str(rank), str(world)],
        "sum": [world * (world + 1) / 2] * 2,
    }


def refuse(what: str, folder: str) -> None:
    """Raises what the caller can tell from other failures; checks what results and texts of graphs are put into."""
    os.environ["XLA_SAVE_TENSORS_FILE"] = f"{folder}/graphs"
    x = torch.arange(8.0, device="xla").view(4, 2)
    out = torch.empty(1, device="xla")
    assert xm.reduce_scatter("sum", x, 1.0, 0, xr.world_size(), output=out) is out
    assert torch.equal(out.cpu(), x.cpu()[xr.global_ordinal() * 2 :][:2] * 2)
    assert "xla::collective" in Path(folder, f"graphs.{xr.global_ordinal()}").read_text()
    raise KeyError(what)


def write_place(index: int, folder: str) -> None:
    """Writes where this process is, and what it found of the others' turns."""
    result = place(index)
    (Path(folder) / f"{index}.json").write_text(json.dumps(result))


def take_turns(index: int, folder: str) -> None:
    """Has a file to itself while it is this process's turn."""
    file = Path(folder) / "taken"

    def alone() -> None:
        file.touch(exist_ok=False)
        time.sleep(0.2)
        file.unlink()

    xm.rendezvous("start")
    TURN.run(alone)


def read_places(folder: Path) -> list[dict[str, Any]]:
    files = sorted(folder.glob("*.json"), key=lambda file: int(file.stem))
    return [json.loads(file.read_text()) for file in files]


if __name__ == "__main__":
    torch_xla.launch(write_place, (sys.argv[1],))
