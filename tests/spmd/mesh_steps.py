"""What programs do with splits: they keep them, choose them, and are compiled once."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import torch_xla
import torch_xla.distributed.spmd as xs
from torch_xla import _XLAC

spec_of = _XLAC._get_xla_sharding_spec
ROWS = "{devices=[8,1]0,1,2,3,4,5,6,7}"
MESH = xs.Mesh(np.arange(8), (8,), ("x",))
GRID = xs.Mesh(np.arange(8), (4, 2), ("data", "model"))


def split(*shape: int) -> torch.Tensor:
    t = torch.randn(*shape).to("xla")
    xs.mark_sharding(t, MESH, ("x",) + (None,) * (len(shape) - 1))
    return t


def test_splits_stay():
    t = split(8, 8)
    t.add_(1)
    assert spec_of(t) == ROWS
    torch_xla.sync()
    assert spec_of(t) == spec_of(t.clone()) == spec_of(copy.deepcopy(t)) == ROWS
    made = t * 2 + torch.ones(8, 8, device="xla")
    torch_xla.sync()
    assert spec_of(made) == ROWS
    t.copy_(torch.zeros(8, 8))
    assert spec_of(t) == ROWS
    t.copy_(torch.randn(8, 8).to("xla"))
    torch_xla.sync()
    assert spec_of(t) == ROWS
    t.normal_()
    torch_xla.sync()
    assert spec_of(t) == ROWS
    t.data = t.data * 2
    torch_xla.sync()
    assert spec_of(t) == ROWS
    with torch.no_grad():
        t[0] = 5
    torch_xla.sync()
    assert spec_of(t) == ROWS and t[0].tolist() == [5] * 8


def test_intermediates_and_views():
    x = torch.randn(4, 6, 8).to("xla")
    h = (x @ torch.randn(8, 16).to("xla")).view(4, 6, 4, 4).transpose(1, 2)
    xs.mark_sharding(h, GRID, ("data", None, None, None))
    y = h * 2
    grads = xs.mark_sharding_with_gradients(y, GRID, ("data", "model", None, None))
    torch_xla.sync()
    assert spec_of(grads).startswith("{devices=[4,2,1,1]")
    assert torch.allclose(grads.cpu(), y.cpu())


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_training_is_one_program(optimizer, compiles):
    def train(marks: bool) -> tuple[list[float], torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Linear(32, 8)
        )
        data, target = torch.randn(5, 16, 16), torch.randn(5, 16, 8)
        options = {"momentum": 0.9} if optimizer is torch.optim.SGD else {}
        if marks:
            model = model.to("xla")
            xs.mark_sharding(model[0].weight, GRID, ("data", "model"))
            xs.mark_sharding(model[3].weight, GRID, ("model", "data"))
        made = optimizer(model.parameters(), lr=0.1, **options)
        losses = []
        for x, y in zip(data, target, strict=True):
            if marks:
                x, y = x.to("xla"), y.to("xla")
                xs.mark_sharding(x, GRID, ("data", None))
                xs.mark_sharding(y, GRID, ("data", None))
            loss = torch.nn.functional.mse_loss(model(x), y)
            made.zero_grad()
            loss.backward()
            made.step()
            if marks:
                torch_xla.sync()
            losses.append(loss.detach())
        return [float(x) for x in losses], model, made

    expected, _, _ = train(False)
    with compiles(1):
        losses, model, made = train(True)
    torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-4)
    weight = model[0].weight
    text = "{devices=[4,2]0,1,2,3,4,5,6,7}"
    assert spec_of(weight) == spec_of(weight.grad) == text
    for value in made.state[weight].values():
        if value is not None and value.dim():
            assert spec_of(value) == text


def test_gradients_of_their_own_program():
    weight = torch.nn.Parameter(torch.randn(16, 8).to("xla"))
    xs.mark_sharding(weight, MESH, ("x", None))
    x = torch.randn(32, 8).to("xla")
    torch.nn.functional.linear(x, weight).square().sum().backward()
    torch_xla.sync()
    assert spec_of(weight.grad) == ROWS
    other = weight.detach().cpu().requires_grad_()
    torch.nn.functional.linear(x.cpu(), other).square().sum().backward()
    torch.testing.assert_close(weight.grad.cpu(), other.grad, rtol=1e-4, atol=1e-4)


def test_fills_and_random_numbers():
    zeros = torch.zeros(16, 8, device="xla")
    xs.mark_sharding(zeros, MESH, ("x", None))
    torch_xla.sync()
    assert spec_of(zeros) == ROWS and zeros.cpu().equal(torch.zeros(16, 8))
    torch.manual_seed(3)
    whole = torch.randn(16, 8, device="xla").cpu()
    torch.manual_seed(3)
    drawn = torch.randn(16, 8, device="xla")
    xs.mark_sharding(drawn, MESH, ("x", None))
    torch_xla.sync()
    assert spec_of(drawn) == ROWS and drawn.cpu().equal(whole)


def test_a_loop_of_new_values(compiles):
    t = split(16, 4)
    with compiles(1):
        for i in range(3):
            t.mul_(i + 2.5)
            torch_xla.sync()
