"""Elements of a tensor with one dimension: which one is no part of the graph, so a loop over them compiles once."""

from __future__ import annotations

import pytest
import torch
from conftest import Counting

import torch_xla

VALUES = [9.0, 7.0, 5.0, 3.0, 1.0]


@pytest.fixture
def table() -> torch.Tensor:
    made = torch.tensor(VALUES).to("xla")
    torch_xla.sync()
    return made


def test_an_index(table: torch.Tensor, compiles: Counting) -> None:
    with compiles(1):
        for i in (*range(5), *range(-5, 0)):
            y = table[i] * 2.5
            torch_xla.sync()
            assert y.item() == VALUES[i] * 2.5


def test_an_iteration(table: torch.Tensor, compiles: Counting) -> None:
    results = []
    with compiles(1):
        for element in table:
            results.append(2.5 - element)
            torch_xla.sync()
    assert [y.item() for y in results] == [2.5 - value for value in VALUES]


def test_an_index_of_an_index(compiles: Counting) -> None:
    rows = torch.arange(12.0).reshape(3, 4).to("xla")
    torch_xla.sync()
    with compiles(1):
        for i in range(4):
            y = rows[2][i] * 0.5
            torch_xla.sync()
            assert y.item() == (8 + i) / 2


def test_writes(table: torch.Tensor, compiles: Counting) -> None:
    x = torch.full((3,), 1.5).to("xla")
    torch_xla.sync()
    with compiles(1):
        for i in range(5):
            table[i] = x.sum() * (i + 2.5)
            torch_xla.sync()
    assert table.tolist() == [4.5 * (i + 2.5) for i in range(5)]


def test_gradients(table: torch.Tensor, compiles: Counting) -> None:
    table.requires_grad_()
    table.grad = torch.zeros_like(table)
    torch_xla.sync()
    with compiles(1):
        for i in range(5):
            (table[i] * 3.5).backward()
            torch_xla.sync()
    assert table.grad.tolist() == [3.5] * 5


def test_all_in_one_graph(table: torch.Tensor, compiles: Counting) -> None:
    with compiles(1):
        y = sum((i + 1.5) * table[i] for i in range(5))
        torch_xla.sync()
    assert isinstance(y, torch.Tensor)
    assert y.item() == sum((i + 1.5) * value for i, value in enumerate(VALUES))


def test_views_of_elements(table: torch.Tensor) -> None:
    first, second, *_ = table
    third = table[2]
    assert [t.storage_offset() for t in (first, second, third)] == [0, 1, 2]
    first += 10
    third.fill_(0.5)
    table[1:3].mul_(2)
    torch_xla.sync()
    assert [first.item(), second.item(), third.item()] == [19, 14, 1]
    assert table.tolist() == [19, 14, 1, 3, 1]


def test_one_that_does_not_exist(table: torch.Tensor) -> None:
    for i in (5, -6):
        with pytest.raises(IndexError, match=f"index {i} is out of bounds for dimension 0 with size 5"):
            table[i]
    assert table.sum().item() == 25


@pytest.mark.by_default("in use the host reads elements by itself")
def test_what_is_read_compiles_nothing(table: torch.Tensor, compiles: Counting) -> None:
    with compiles(0):
        assert [table[i].item() for i in range(5)] == [element.item() for element in table] == VALUES
