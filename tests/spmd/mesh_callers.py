"""What stands on splits: loaders, FSDP, linear layers, DTensor, attention, dynamo."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.parallel_loader as pl
import torch_xla.distributed.spmd as xs
from torch_xla import _XLAC
from torch_xla.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch_xla.experimental.custom_kernel import flash_attention
from torch_xla.experimental.spmd_fully_sharded_data_parallel import SpmdFullyShardedDataParallel

spec_of = _XLAC._get_xla_sharding_spec
ROWS = "{devices=[8,1]0,1,2,3,4,5,6,7}"
MESH = xs.Mesh(np.arange(8), (8, 1), ("fsdp", "tensor"))
GRID = xs.Mesh(np.arange(8), (4, 2), ("data", "model"))


def test_send_and_loader(compiles):
    x, y = torch.arange(128.0).reshape(16, 8), torch.arange(16)
    rows, grid = xs.ShardingSpec(MESH, ("fsdp", None)), xs.ShardingSpec(GRID, ("data", "model"), minibatch=True)
    with compiles(0):
        (sent,) = xm.send_cpu_data_to_device([x], torch_xla.device(), rows)
        assert spec_of(sent) == ROWS and sent.cpu().equal(x)
        (sent,) = xm.send_cpu_data_to_device([x], torch_xla.device(), grid)
        assert spec_of(sent).startswith("{devices=[4,2]0") and sent.cpu().equal(x)
    loader = pl.MpDeviceLoader([(x, y)], torch_xla.device(), input_sharding=rows)
    ((a, b),) = list(loader)
    assert spec_of(a) == ROWS and spec_of(b) == "" and b.tolist() == y.tolist()
    loader = pl.MpDeviceLoader([{"x": x, "y": y}], torch_xla.device(), input_sharding={"x": grid, "y": None})
    (batch,) = list(loader)
    assert spec_of(batch["x"]).startswith("{devices=[4,2]0") and batch["x"].cpu().equal(x)
    with pytest.raises(KeyError):
        list(pl.MpDeviceLoader([{"x": x, "z": y}], torch_xla.device(), input_sharding={"x": grid}))
    with pytest.raises(RuntimeError, match="per-host batch size must be divisible"):
        xm.send_cpu_data_to_device([x[:7]], torch_xla.device(), grid)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x)))


@pytest.mark.parametrize("wrap", [False, True])
def test_fsdp(wrap, compiles):
    torch.manual_seed(0)
    plain = torch.nn.Sequential(Block(), Block())
    model = torch.nn.Sequential(Block(), Block())
    model.load_state_dict(plain.state_dict())
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}) if wrap else None
    model = SpmdFullyShardedDataParallel(model, mesh=MESH, auto_wrap_policy=policy)
    assert isinstance(model.module[0], SpmdFullyShardedDataParallel) == wrap
    assert spec_of(model.module[0].up.weight) == ROWS
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    with compiles(1):
        for _ in range(2):
            x = torch.randn(16, 32)
            losses = []
            for m, optimizer, own in ((plain, optimizers[0], x), (model, optimizers[1], x.to("xla"))):
                if own is not x:
                    xs.mark_sharding(own, MESH, ("fsdp", None))
                loss = m(own).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            torch_xla.sync()
            torch.testing.assert_close(losses[1].cpu(), losses[0], rtol=1e-3, atol=1e-5)
    weight = model.module[0].up.weight
    assert spec_of(weight) == spec_of(optimizers[1].state[weight]["exp_avg"]) == ROWS


def test_linear_layers():
    model = xs.xla_sharding.apply_xla_patch_to_nn_linear(torch.nn.Sequential(torch.nn.Linear(8, 4)))
    assert isinstance(model[0], xs.EinsumLinear)
    x = torch.randn(2, 3, 8)
    expected = torch.nn.functional.linear(x, model[0].weight, model[0].bias).detach()
    torch.testing.assert_close(model.to("xla")(x.to("xla")).cpu(), expected, rtol=1e-5, atol=1e-5)


def test_dtensor():
    from torch.distributed.tensor import Replicate, Shard

    t = torch.arange(64.0).reshape(8, 8)
    split = xs.mark_sharding(t.to("xla"), GRID, ("data", "model"))
    assert split.placements == (Shard(0), Shard(1))
    other = split.redistribute(GRID, [Replicate(), Shard(1)], async_op=True)
    torch_xla.sync()
    assert spec_of(other) == "{devices=[1,2,4]0,2,4,6,1,3,5,7 last_tile_dim_replicate}" and other.cpu().equal(t)
    full = split.full_tensor()
    torch_xla.sync()
    assert spec_of(full) == "{replicated}" and full.cpu().equal(t)
    with pytest.raises(ValueError, match="must match mesh dimensions"):
        split.redistribute(GRID, [Shard(0)])
    with pytest.raises(IndexError):
        split.redistribute(GRID, [Shard(2), Replicate()])
    wrapped = torch.nn.Parameter(xs.mark_sharding(t.to("xla"), MESH, ("fsdp", None)))
    assert spec_of(wrapped) == ROWS and (wrapped * 2).sum().item() == t.sum().item() * 2


def test_attention_and_shard_as():
    q, k, v = (torch.randn(4, 2, 16, 8) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)
    spec = ("data", "model", None, None)
    result = flash_attention(*(t.to("xla") for t in (q, k, v)), causal=True, partition_spec=spec, mesh=GRID)
    torch.testing.assert_close(result.cpu(), expected, rtol=1e-4, atol=1e-5)
    x = torch.randn(8, 8).to("xla")
    xs.mark_sharding(x, MESH, ("fsdp", None))
    a, b = xs.shard_as(x, torch.randn(8, 8).to("xla"))
    torch_xla.sync()
    assert spec_of(a) == spec_of(b) == ROWS


def test_compiled_step(compiles):
    model = Block().to("xla")
    xs.mark_sharding(model.up.weight, GRID, ("model", "data"))

    @torch_xla.compile(full_graph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with compiles(1):
        for _ in range(2):
            model.zero_grad()
            x = torch.randn(8, 32).to("xla")
            xs.mark_sharding(x, GRID, ("data", None))
            step(x)


def test_a_loaded_state_is_split_as_its_parameter():
    def made():
        model = torch.nn.Linear(64, 64, bias=False).to("xla")
        xs.mark_sharding(model.weight, MESH, ("fsdp", None))
        return model, torch.optim.AdamW(model.parameters())

    def step(model, optimizer):
        model(torch.ones(8, 64, device="xla")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()

    model, optimizer = made()
    step(model, optimizer)
    saved = xm._maybe_convert_to_cpu(optimizer.state_dict())
    other, loaded = made()
    loaded.load_state_dict(saved)
    for _ in range(2):
        step(other, loaded)
        moment = loaded.state[other.weight]["exp_avg"]
        assert spec_of(moment) == ROWS
        assert {tuple(shard.unpadded_data.shape) for shard in xs.XLAShardedTensor(moment).local_shards} == {(8, 64)}
    expected = saved["state"][0]["exp_avg"] * 0.9**2 + 8 * 0.1 * 1.9
    torch.testing.assert_close(moment.cpu(), expected)
