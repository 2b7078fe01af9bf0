"""The rest of the surface with splits: DTensor's functions, scans, checkpointing, torch.compile."""

from __future__ import annotations

import copy
import os

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla import _XLAC
from torch_xla.experimental.scan import scan
from torch_xla.experimental.scan_layers import scan_layers
from torch_xla.utils.checkpoint import checkpoint

spec_of = _XLAC._get_xla_sharding_spec
GRID = xs.Mesh(np.arange(8), (4, 2), ("data", "model"))
BOTH = "{devices=[4,2]0,1,2,3,4,5,6,7}"


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def blocks(count: int) -> tuple[torch.nn.Sequential, torch.nn.Sequential]:
    """The same layers on the CPU, and split over both axes."""
    torch.manual_seed(3)
    plain = torch.nn.Sequential(*(Block() for _ in range(count)))
    split = copy.deepcopy(plain).to("xla")
    for block in split:
        xs.mark_sharding(block.up.weight, GRID, ("model", "data"))
        xs.mark_sharding(block.down.weight, GRID, ("data", "model"))
    return plain, split


def rows(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same numbers on the CPU, and split over the first axis."""
    x = torch.randn(*shape)
    split = x.to("xla")
    xs.mark_sharding(split, GRID, ("data",) + (None,) * (len(shape) - 1))
    return x, split


def same_gradients(split: torch.nn.Module, plain: torch.nn.Module) -> None:
    for own, other in zip(split.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad.cpu(), other.grad, rtol=1e-3, atol=1e-4)


def test_asked_again(monkeypatch):
    monkeypatch.delenv("XLA_USE_SPMD")
    xr.use_spmd()
    assert os.environ["XLA_USE_SPMD"] == "1"


def test_distribute_tensor():
    mesh = DeviceMesh("xla", torch.arange(8).reshape(4, 2), mesh_dim_names=("data", "model"))
    t = torch.arange(64.0).reshape(8, 8)
    split = distribute_tensor(t, mesh, [Shard(0), Shard(1)])
    assert spec_of(split) == BOTH and split.placements == (Shard(0), Shard(1)) and split.cpu().equal(t)
    assert split.device_mesh.shape == (4, 2)
    other = split.redistribute(mesh, [Replicate(), Shard(0)])
    torch_xla.sync()
    assert spec_of(other).startswith("{devices=[2,1,4]0,2,4,6") and other.full_tensor().cpu().equal(t)
    assert spec_of(distribute_tensor(t, mesh)) == "{replicated}"
    with pytest.raises(AssertionError, match="2, one per mesh axis"):
        distribute_tensor(t, mesh, [Shard(0)])


def test_distribute_module(compiles):
    mesh = DeviceMesh("xla", torch.arange(8).reshape(4, 2), mesh_dim_names=("data", "model"))

    def part(name: str, module: torch.nn.Module, mesh: DeviceMesh) -> None:
        if isinstance(module, torch.nn.Linear):
            module.weight = torch.nn.Parameter(distribute_tensor(module.weight.detach(), mesh, [Shard(0), Shard(1)]))
            module.bias = torch.nn.Parameter(distribute_tensor(module.bias.detach(), mesh))

    torch.manual_seed(3)
    plain = Block()
    split = distribute_module(
        copy.deepcopy(plain), mesh, part,
        lambda module, inputs, mesh: (distribute_tensor(inputs[0], mesh, [Shard(0), Replicate()]),),
        lambda module, output, mesh: output.redistribute(mesh, [Shard(0), Replicate()]),
    )  # fmt: skip
    assert spec_of(split.up.weight) == BOTH
    x = torch.randn(8, 16)
    with compiles(1):
        result = split(x.to("xla"))
        result.square().sum().backward()
        torch_xla.sync()
    expected = plain(x)
    expected.square().sum().backward()
    torch.testing.assert_close(result.full_tensor().cpu(), expected, rtol=1e-4, atol=1e-4)
    same_gradients(split, plain)


def test_scans(compiles):
    plain, split = blocks(3)
    x, own = rows(8, 16)
    plain(x).square().sum().backward()
    with compiles(1):
        scan_layers(list(split), own).square().sum().backward()
        torch_xla.sync()
    same_gradients(split, plain)
    for block, twin in zip(split, plain, strict=True):
        torch.testing.assert_close(block(own).cpu(), twin(x), rtol=1e-4, atol=1e-4)
    xs_, own = rows(8, 4, 16)
    carry, sums = scan(lambda carry, x: (carry + x, carry * 2), torch.zeros(4, 16, device="xla"), own)
    torch.testing.assert_close(carry.cpu(), xs_.sum(0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums[-1].cpu(), xs_[:-1].sum(0) * 2, rtol=1e-5, atol=1e-5)


def test_checkpointing(compiles):
    plain, split = blocks(2)
    x, own = rows(8, 16)
    plain(x).square().sum().backward()
    own.requires_grad_()
    with compiles(1):  # both kinds become the same graph
        for function, reentrant in ((torch.utils.checkpoint.checkpoint, False), (checkpoint, True)):
            split.zero_grad()
            own.grad = None
            y = own
            for block in split:
                y = function(block, y, use_reentrant=reentrant)
            y.square().sum().backward()
            torch_xla.sync()
            same_gradients(split, plain)
    assert all(spec_of(p.grad) == spec_of(p) for p in split.parameters() if p.dim() == 2)


@pytest.mark.parametrize("graph", [True, False])
def test_torch_compile(graph, compiles):
    plain, split = blocks(2)
    made = torch.compile(split, backend="openxla", fullgraph=graph)
    for _ in range(3):
        x, own = rows(8, 16)
        for module, value in ((plain, x), (made, own)):
            module.zero_grad()
            module(value).square().sum().backward()
        torch_xla.sync()
        same_gradients(split, plain)
    assert spec_of(split[0].up.weight).startswith("{devices=[2,4]")
    x, own = rows(8, 16)
    with torch.no_grad():
        torch.testing.assert_close(made(own).cpu(), plain(x), rtol=1e-4, atol=1e-4)


def test_marks_under_torch_compile():
    def marked(x: torch.Tensor, spec: str) -> torch.Tensor:
        y = x + 1
        torch.ops.xla.dynamo_mark_sharding(y, list(range(8)), [4, 2], "('a', 'b')", spec)
        return y * 2

    x = torch.ones(8, 4, device="xla")
    assert torch.compile(marked, backend="openxla")(x, "('a', None)").tolist() == marked(x, "('a', 'b')").tolist()


def test_graph(compiles):
    plain, split = blocks(2)
    other, optimizer = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, split))
    optimizer.param_groups[0]["capturable"] = True
    x, own = rows(8, 16)

    def step(model, update, x):
        loss = model(x).square().mean()
        loss.backward()
        update.step()
        update.zero_grad()
        return loss.detach()

    graph = torch_xla.Graph()
    for i in range(6):
        if i < 2:
            result = step(split, optimizer, own)
        elif i == 2:
            with graph:
                result = step(split, optimizer, own)
        if i >= 2:
            with compiles(0):
                graph.replay()
        torch.testing.assert_close(result.cpu(), step(plain, other, x), rtol=1e-3, atol=1e-5)
    assert spec_of(optimizer.state[split[0].up.weight]["exp_avg"]) == spec_of(split[0].up.weight)
