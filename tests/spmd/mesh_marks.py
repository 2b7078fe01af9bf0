"""What is asked for: specs, strings, shards, bad inputs."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
import torch

import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch_xla import _XLAC
from torch_xla._core.device import client
from torch_xla.core.xla_builder import create_placeholder_tensor

spec_of = _XLAC._get_xla_sharding_spec


def mesh(*shape: int, names: tuple[str, ...] | None = None) -> xs.Mesh:
    return xs.Mesh(np.arange(8), shape, names)


def test_all_devices_are_one():
    assert xr.is_spmd() and xr.global_runtime_device_count() == 8 and xr.addressable_device_count() == 1
    assert torch_xla.device() == torch.device("xla:0")
    assert [a["name"] for a in xr.global_runtime_device_attributes()] == [client.hardware(i) for i in range(8)]


@pytest.mark.parametrize(
    ("shape", "names", "spec", "text"),
    [
        ((8,), None, (0, None), "{devices=[8,1]0,1,2,3,4,5,6,7}"),
        ((4, 2), None, (0, 1), "{devices=[4,2]0,1,2,3,4,5,6,7}"),
        ((4, 2), None, (1, 0), "{devices=[2,4]0,2,4,6,1,3,5,7}"),
        ((4, 2), ("data", "model"), ("model", None), "{devices=[2,1,4]0,2,4,6,1,3,5,7 last_tile_dim_replicate}"),
        ((4, 2), ("data", "model"), (("data", "model"), None), "{devices=[8,1]0,1,2,3,4,5,6,7}"),
        ((4, 2), ("data", "model"), (("model", "data"), None), "{devices=[8,1]0,2,4,6,1,3,5,7}"),
        ((2, 2, 2), None, (2, 1), "{devices=[2,2,2]0,4,2,6,1,5,3,7 last_tile_dim_replicate}"),
        ((1, 8), None, (None, 0), "{replicated}"),
        ((4, 2), None, (None, None), "{replicated}"),
    ],
)
def test_spec_as_xla_writes_it(shape, names, spec, text):
    t = torch.arange(64.0).reshape(8, 8).to("xla")
    assert spec_of(t) == ""
    marked = xs.mark_sharding(t, mesh(*shape, names=names), spec)
    assert spec_of(t) == marked.sharding_spec == text
    assert str(mesh(*shape, names=names).get_op_sharding(spec)) == text
    torch.testing.assert_close((t + 1).cpu(), torch.arange(64.0).reshape(8, 8) + 1)
    assert spec_of(t) == text


def test_devices_in_any_order():
    flipped = xs.Mesh(np.arange(8)[::-1], (8,))
    odd = xs.Mesh([3, 1, 0, 2, 7, 5, 6, 4], (8,))
    a, b = torch.arange(16.0).to("xla"), torch.arange(16.0).to("xla")
    xs.mark_sharding(a, flipped, (0,))
    xs.mark_sharding(b, odd, (0,))
    assert spec_of(a) == "{devices=[8]7,6,5,4,3,2,1,0}"
    torch.testing.assert_close((a * b).cpu(), torch.arange(16.0) ** 2)
    shards = xs.XLAShardedTensor(b).local_shards
    assert shards[3].data.tolist() == [0, 1] and shards[3].shard_device == client.hardware(3)


def test_shards():
    t = torch.arange(64.0).reshape(8, 8)
    split = xs.mark_sharding(t.to("xla"), mesh(4, 2), (None, 1))
    for i, shard in enumerate(split.local_shards):
        assert shard.indices == [slice(0, 8, 1), slice(i % 2 * 4, i % 2 * 4 + 4, 1)] and shard.replica_id == i // 2
        assert shard.data.equal(t[tuple(shard.indices)])
    assert split.sharding_type == xs.ShardingType.PARTIAL
    whole = xs.mark_sharding(t.to("xla"), mesh(8), (None, None)).local_shards
    assert [s.replica_id for s in whole] == list(range(8)) and all(s.indices is ... for s in whole)
    rows = xs.mark_sharding(t.to("xla"), mesh(8), (0, None))
    shards = rows.local_shards
    for shard in shards:
        shard.data *= -1
    rows.load_local_shards_(shards)
    assert rows.cpu().equal(-t)
    with pytest.raises(RuntimeError, match="shards of"):
        rows.load_local_shards_(shards[:-1])
    with pytest.raises(RuntimeError, match="without a sharding"):
        xs.mark_sharding(t.to("xla"), mesh(8), (None, None)).load_local_shards_(shards)


def test_sizes_that_do_not_divide():
    t = torch.arange(30.0).reshape(10, 3)
    split = xs.mark_sharding(t.to("xla"), mesh(8), (0, None))
    shards = split.local_shards
    assert [tuple(s.data.shape) for s in shards] == [(2, 3)] * 8
    assert shards[4].unpadded_data.equal(t[8:]) and shards[5].unpadded_data.numel() == 0
    assert split.sharding_spec == "{devices=[8,1]0,1,2,3,4,5,6,7}"
    torch.testing.assert_close((split * 2).cpu(), t * 2)
    split += 1
    torch_xla.sync()
    assert spec_of(split) == "{devices=[8,1]0,1,2,3,4,5,6,7}" and split.cpu().equal(t + 1)


@pytest.mark.by_default("a read of little, which no program computes")
def test_a_read_beside_splits_that_do_not_divide():
    for rows in (1, 3, 6):
        t = torch.arange(8.0 * rows).reshape(rows, 8)
        made = t.to("xla") * 2
        xs.mark_sharding(made, mesh(8), (0, None))
        assert made.sum().item() == t.sum().item() * 2
        assert spec_of(made) == "{devices=[8,1]0,1,2,3,4,5,6,7}" and made.cpu().equal(t * 2)
        torch_xla.sync()
        assert (made + 1).cpu().equal(t * 2 + 1)


def test_reading_compiles_nothing(compiles):
    t = torch.arange(64.0).reshape(8, 8)
    split = t.to("xla")
    xs.mark_sharding(split, mesh(4, 2), (0, 1))
    made = split + 1
    torch_xla.sync()
    with compiles(0):
        assert split.cpu().equal(t) and made.cpu().equal(t + 1)
        assert "63." in repr(split) and copy.deepcopy(split).tolist() == t.tolist()


def test_bad_input():
    t = torch.zeros(8, 8).to("xla")
    with pytest.raises(ValueError, match="rank"):
        xs.mark_sharding(t, mesh(8), (0,))
    with pytest.raises(ValueError, match="axis 'x'"):
        xs.mark_sharding(t, mesh(8), ("x", None))
    with pytest.raises(ValueError, match="at most once"):
        xs.mark_sharding(t, mesh(8), (0, 0))
    with pytest.raises(ValueError, match="nested"):
        xs.mark_sharding(t, mesh(8), (((0,),), None))
    with pytest.raises(ValueError, match="tensor on cpu"):
        xs.mark_sharding(torch.zeros(8, 8), mesh(8), (0, None))
    with pytest.raises(ValueError, match="global number of devices"):
        xs.Mesh(np.arange(4), (4,))
    xs.mark_sharding(t, mesh(8), (0, None))
    with pytest.raises(RuntimeError, match="clear_sharding"):
        xs.mark_sharding(t, mesh(8), (None, 0))
    xs.clear_sharding(t)
    assert spec_of(t) == ""
    xs.mark_sharding(t, mesh(8), (None, 0))


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("compiled", marks=pytest.mark.compiled("both ways")),
        pytest.param("by default", marks=pytest.mark.by_default("both ways")),
    ],
)
def test_a_buffer_that_is_gone_is_said(way):
    t = torch.ones(8, 8).to("xla")
    xs.mark_sharding(t, mesh(8), (0, None))
    torch_xla.sync()
    (buffer,) = torch_xla._core.execute.barrier.buffers([t])
    buffer.delete()
    del buffer
    with pytest.raises(RuntimeError, match="is gone"):
        (t + 1).cpu()


def test_what_has_no_values_is_where_it_is_asked_to_be():
    t = create_placeholder_tensor((8, 4), torch.float32)
    xs.mark_sharding(t, mesh(8), (0, None))
    assert spec_of(t) == "{devices=[8,1]0,1,2,3,4,5,6,7}"
    text = _XLAC._get_stablehlo([t + 1]).decode()
    assert re.search(r'tensor<8x4xf32> \{.*\[\{"', text.split("->")[0])
