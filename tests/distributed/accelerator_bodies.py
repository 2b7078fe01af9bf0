"""What test_accelerator.py runs: programs that are written for whichever accelerator there is."""

from __future__ import annotations

import io
import os
import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader

import torch_xla
import torch_xla.distributed.xla_backend  # noqa: F401


def saved(value: object) -> bytes:
    """A file of `torch.save`."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def device_agnostic(index: int) -> None:
    """Groups, meshes, splits of groups, pinned memory and offloaded parameters, none of which names xla."""
    torch_xla.experimental.use_as_accelerator()
    place = torch.accelerator.current_accelerator(check_available=True)
    assert place is not None and torch.accelerator.device_count() == 1
    torch.accelerator.set_device_index(torch.accelerator.current_device_index())
    device = torch.device(place.type, torch.accelerator.current_device_index())
    dist.init_process_group(device_id=device)
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.get_backend() == dist.get_default_backend_for_device(device) == "xla"
    own = dist.split_group(split_ranks=[[r] for r in range(size)])
    assert own is not None and dist.get_process_group_ranks(own) == [rank]
    mesh = init_device_mesh(place.type, (1, size), mesh_dim_names=("dp", "tp"))
    for group, expected in ((own, rank), (mesh["tp"].get_group(), 1), (None, 1)):
        total = torch.full((2,), float(rank), device=device)
        dist.all_reduce(total, group=group)
        assert total.tolist() == [expected] * 2
    # A process has one device: the number of its LOCAL_RANK means that one, others are refused at their line.
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    assert torch.accelerator.current_device_index() == 0 == torch.xla.current_device()
    with torch.device("xla", rank):
        assert torch.ones(1).to(f"xla:{rank}").device == torch.device("xla:0")
    assert torch.load(io.BytesIO(saved(torch.ones(1))), map_location=f"xla:{rank}").device == torch.device("xla:0")
    for refused in (
        torch.accelerator.set_device_index,
        torch.xla.set_device,
        lambda i: torch.ones(1, device=f"xla:{i}"),
    ):
        with pytest.raises(RuntimeError, match=r"\[device\] got xla:9, available are xla:0 to xla:0"):
            refused(9)
    (batch,) = DataLoader(torch.arange(4.0).reshape(2, 2), batch_size=2, pin_memory=True)
    for options in ({}, {"offload_policy": CPUOffloadPolicy()}):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        plain = torch.nn.Linear(2, 2)
        plain.load_state_dict(model.state_dict())
        fully_shard(model.to(device), **options)
        model(batch.to(device, non_blocking=True)).sum().backward()
        plain(batch).sum().backward()
        torch.testing.assert_close(model.weight.grad.to_local().cpu(), plain.weight.grad.chunk(size)[rank])
        assert model.weight.grad.device.type == ("cpu" if options else "xla")
    torch.accelerator.synchronize()
    assert torch.accelerator.memory_allocated() <= torch.accelerator.max_memory_allocated()
    assert torch._utils._get_available_device_type() == place.type
    module = torch.get_device_module(device)
    module.reset_peak_memory_stats()
    total = module.get_device_properties(device).total_memory
    assert 0 < module.memory_stats(device)["active_bytes.all.peak"] < total
    with_fake = init_device_mesh(
        place.type, (1, size), mesh_dim_names=("pp", "tp"), backend_override={"pp": "fake"}
    )  # a dimension of one process, as in torchtitan
    assert "Fake" in type(with_fake["pp"].get_group()._get_backend(device)).__name__
    rows = distribute_tensor(torch.ones(size, 2), with_fake["tp"], [Shard(0)])
    assert rows.full_tensor().tolist() == [[1.0, 1.0]] * size


def refused() -> None:
    """Without being asked for: each says in one line how to ask."""
    how = re.compile(r"torch_xla\.experimental\.use_as_accelerator\(\) before.*XLA_USE_AS_ACCELERATOR=1")

    def model() -> torch.nn.Module:
        return torch.nn.Linear(2, 2).to("xla")

    def in_gloo() -> None:
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        try:
            dist.all_gather([torch.ones(2, device="xla")], torch.ones(2, device="xla"))
        finally:
            dist.destroy_process_group()

    def with_mesh() -> None:
        fully_shard(model(), mesh=init_device_mesh("xla", (1,)), offload_policy=CPUOffloadPolicy())

    def without_mesh() -> None:
        fully_shard(model())

    for run in (
        lambda: dist.init_process_group("xla", device_id=torch.device("xla:0")),
        in_gloo,
        without_mesh,
        with_mesh,
    ):
        if run is without_mesh:
            dist.init_process_group("xla", init_method="xla://")
        try:
            run()
        except (RuntimeError, ValueError) as error:
            assert how.search(str(error)), error
        else:
            raise AssertionError(run)
