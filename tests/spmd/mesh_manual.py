"""Manual sharding, and the check of split programs against whole ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
from torch_xla import _XLAC
from torch_xla._core.execute import sharding_check

GRID = xs.Mesh(np.arange(8), (4, 2), ("a", "b"))
ALL = [list(range(8))]


@pytest.mark.compiled("what enters or leaves parts only a program computes", reads=False)
def test_operators_on_parts(compiles):
    t = torch.arange(64.0).reshape(8, 8)
    part = xs.enable_manual_sharding(t.to("xla"), ("a", "b"), mesh=GRID)
    assert part.shape == (2, 4) and part.sharding_spec == "{manual}"
    sums = part.global_tensor.sum(1, keepdim=True).expand(2, 4) + 1
    whole = xs.disable_manual_sharding(sums, ("a", "b"), torch.Size((8, 8)), mesh=GRID)
    expected = t.reshape(8, 2, 4).sum(2, keepdim=True).expand(8, 2, 4).reshape(8, 8) + 1
    with compiles(1):
        assert whole.cpu().equal(expected)


def test_what_devices_do_together():
    ones = torch.ones(8, 8).to("xla")
    part = xs.enable_manual_sharding(ones, (None, None), mesh=GRID).global_tensor
    summed = _XLAC._xla_spmd_all_reduce(xm.REDUCE_SUM, part, 0.5, ALL)
    rows = _XLAC._xla_spmd_all_reduce(xm.REDUCE_SUM, part, 1.0, [[0, 2, 4, 6], [1, 3, 5, 7]])
    shared = _XLAC._xla_spmd_reduce_scatter(xm.REDUCE_SUM, part, 1.0, -1, 8, ALL)
    results = [xs.disable_manual_sharding(x, (None, None), x.shape, mesh=GRID).cpu() for x in (summed, rows, shared)]
    assert [(tuple(x.shape), x.unique().tolist()) for x in results] == [((8, 8), [4]), ((8, 8), [4]), ((8, 1), [8])]


def test_bad_input():
    with pytest.raises(RuntimeError, match="sizes that the tiles divide"):
        xs.enable_manual_sharding(torch.ones(6, 8).to("xla"), ("a", None), mesh=GRID)
    with pytest.raises(RuntimeError, match="without a sharding"):
        _XLAC._spmd_full_to_shard_shape(torch.ones(8, 8).to("xla"))
    part = xs.enable_manual_sharding(torch.ones(8, 8).to("xla"), ("a", None), mesh=GRID)
    with pytest.raises(ValueError, match="full_shape"):
        xs.disable_manual_sharding(part, ("a", None), torch.Size((9, 8)), mesh=GRID)


@pytest.mark.compiled("small reads are no programs, and not compared")
def test_programs_are_compared_with_whole_ones(monkeypatch):
    monkeypatch.setenv("XLA_SPMD_VERIFY", "1")
    weight = torch.nn.Parameter(torch.randn(16, 8).to("xla"))
    xs.mark_sharding(weight, GRID, ("a", "b"))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    for _ in range(2):
        (torch.randn(4, 8).to("xla") @ weight.T).square().sum().backward()
        optimizer.step()
        torch_xla.sync()
    seen = []
    compare = sharding_check._compare

    def planted(node, result, value, other):
        seen.append(node.op)
        compare(node, result, value + 1 if node.op == "aten.sin.default" else value, other)

    monkeypatch.setattr(sharding_check, "_compare", planted)
    with pytest.raises(RuntimeError, match=r"result 0 of aten\.sin\.default differs"):
        (weight.detach() * 2).sin().cos().cpu()
    assert "aten.cos.default" not in seen
