"""Writes at masks, alone and beside indices: how many places there are is told by the masks, not by the values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_xla

Tensor = torch.Tensor

ROWS = torch.tensor([True, False, True])  # two places
ONE = torch.tensor([False, True, False])
NONE = torch.tensor([False, False, False])
GRID = torch.tensor([[True, False, False], [False, True, False], [False, False, False]])
TWO = torch.tensor([0, 2])
SINGLE = torch.tensor([1])
COLUMN = torch.tensor([[0], [2]])
ALL = slice(None)

# The shapes of values that fit are tried; the others are refused on the CPU.
KEYS = {
    "mask": (ROWS,),
    "bytes": (ROWS.byte(),),
    "mask of two dimensions": (GRID,),
    "mask behind a slice": (ALL, ROWS),
    "mask and indices": (ROWS, TWO),
    "mask and a single index": (ROWS, SINGLE),
    "mask and a number": (ROWS, torch.tensor(1)),
    "indices and mask": (TWO, ROWS),
    "mask and a column of indices": (ROWS, COLUMN),
    "mask and a row of indices": (ROWS, COLUMN.T),
    "mask of two dimensions and indices": (GRID, TWO),
    "two masks": (ROWS, ROWS),
    "one place for all": (ONE, ROWS),
    "one place in each": (ONE, ONE),
    "one place and indices": (TWO, ONE),
    "no place": (NONE, SINGLE),
    "no places": (NONE, ONE),
    "apart": (ROWS, ALL, TWO),
    "apart, a single index": (SINGLE, ALL, ROWS),
    "apart, two masks": (ROWS, ALL, ROWS),
    "behind a slice": (ALL, ROWS, TWO),
    "three": (ROWS, TWO, ROWS),
}
SHAPES: list[tuple[int, ...]] = [(), (1,), (2,), (3,), (2, 1), (2, 3), (2, 2), (1, 3), (1, 3, 3), (0,)]


def writes(key: tuple[Any, ...], device: str) -> list[Tensor]:
    """The writes at a key that PyTorch accepts, of values of each shape, stored or added."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        values = [torch.rand(shape) + 1 for shape in SHAPES]
        x = torch.rand(3, 3, 3)
    where = [None if k is ALL else k.to(device) for k in key]
    done = []
    for i, value in enumerate(values):
        accumulate = i % 2 == 1
        try:
            torch.ops.aten.index_put(x, [None if k is ALL else k for k in key], value, accumulate)
        except (IndexError, RuntimeError):
            continue
        done.append(torch.ops.aten.index_put(x.to(device), where, value.to(device), accumulate))
    return done


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("key", KEYS.values(), ids=list(KEYS))
def test_writes_at_masks(key):
    expected = writes(key, "cpu")
    got = writes(key, "xla")
    torch_xla.sync()
    assert len(expected) >= 2
    for e, g in zip(expected, got, strict=True):
        torch.testing.assert_close(g.cpu(), e, rtol=0, atol=1e-6)


def gradients(key: tuple[Any, ...], device: str) -> list[Tensor]:
    x = torch.zeros(3, 3, 3).to(device).requires_grad_()
    value = torch.tensor([2.0]).to(device).requires_grad_()
    written = torch.ops.aten.index_put(x, [None if k is ALL else k.to(device) for k in key], value)
    (written * torch.arange(27.0).view(3, 3, 3).to(device)).sum().backward()
    assert x.grad is not None and value.grad is not None
    return [x.grad, value.grad]


@pytest.mark.parametrize("key", [(ROWS, TWO), (ROWS, ROWS), (ONE, ROWS), (SINGLE, ALL, ROWS)])
def test_gradients_of_writes_at_masks(key):
    for e, g in zip(gradients(key, "cpu"), gradients(key, "xla"), strict=True):
        assert torch.equal(g.cpu(), e)
