"""Several devices of a PJRT plugin: by number, as a mesh, and in jobs that its client knows nothing of."""

from __future__ import annotations

from pathlib import Path

import plugin
import pytest
from probes import python

pytestmark = pytest.mark.skipif(plugin.library() is None, reason=plugin.MISSING)

TRAINING = """
from threading import Lock, Thread
import torch, torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr

seeded = Lock()

def train(device, rank=0, world=1, prepare=lambda model, batch: None):
    with seeded:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)).to(device)
        x = torch.rand(16, 8).chunk(world)[rank].to(device)
    prepare(model, x)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        xm.optimizer_step(optimizer) if world > 1 else optimizer.step()
        torch_xla.sync()
    return torch.cat([p.detach().cpu().flatten() for p in model.parameters()])
"""


def run(program: str, folder: Path, devices: int) -> str:
    environment = plugin.environment(folder, cpu_device_count=devices) | {"XLA_HOST_COMPUTE": "never"}
    return python("-c", TRAINING + program, imported=True, **environment).stdout


def test_devices_by_number(tmp_path: Path) -> None:
    run(
        """
x = torch.arange(3.0, device="xla:2")
assert xr.addressable_device_count() == torch.xla.device_count() == 3 and xm.xla_device(1).index == 1
y = x.to("xla:1") * 2
y += x.to("xla:0").to("xla:1")
assert y.device.index == 1 and y.tolist() == [0, 3, 6]
try:
    torch.ones(2, device="xla:3")
except RuntimeError as error:
    assert "[device] got xla:3, available are xla:0 to xla:2" in str(error)
else:
    raise AssertionError("xla:3 is there")
found = {}
threads = [Thread(target=lambda i=i: found.update({i: train(f"xla:{i}")})) for i in (0, 2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
for i in found:
    torch.testing.assert_close(found[i], train("cpu"))
assert len(found) == 2
""",
        tmp_path,
        3,
    )


def test_a_mesh_of_them(tmp_path: Path) -> None:
    """Parameters and batch are split over four devices, as FSDP by SPMD has them."""
    run(
        """
import numpy as np
import torch_xla.distributed.spmd as xs

xr.use_spmd()

def split(model, batch):
    mesh = xs.Mesh(np.arange(4), (4,))
    for t in (batch, *model.parameters()):
        xs.mark_sharding(t, mesh, (0,) + (None,) * (t.ndim - 1))
    shards = xs.XLAShardedTensor(model[0].weight).local_shards
    assert [(s.shard_device, tuple(s.data.shape)) for s in shards] == [(f"vendor:{i}", (4, 8)) for i in range(4)]

torch.testing.assert_close(train("xla", prepare=split), train("cpu"))
""",
        tmp_path,
        4,
    )


def test_a_job(tmp_path: Path) -> None:
    """Collectives are the host's, between two programs; what processes do otherwise than others is an error in all."""
    told = run(
        """
from torch.multiprocessing.spawn import ProcessRaisedException
from torch_xla._core.device import client
from torch_xla._core.job import launcher

def work(index):
    torch.testing.assert_close(train("xla", index, 2), train("cpu"))
    assert met.counter_value("xla::collective") == 3 and client.hardware_devices()[0].local_hardware_id == index
    xm.all_reduce("sum" if index else "max", torch.ones(3, device="xla"))

def split(index):
    xr.use_spmd()
    torch.ones(3, device="xla").tolist()

for fn in (work, split):
    try:
        launcher.run(fn, (), 2, start_method="fork")
    except ProcessRaisedException as error:
        print(str(error).strip().splitlines()[-1])
""",
        tmp_path,
        2,
    )
    differ, spmd = told.splitlines()
    assert "the processes differ in what they do together: rank 0 runs all_reduce(max) of float32[3]" in differ
    assert "[spmd] got a job of 2 processes, but the client of each knows only its own 2 device(s) of vendor" in spmd
