"""Layouts that the device does not have are refused in two lines, at the call, and the next call works."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torch_xla  # noqa: F401


def from_host() -> Tensor:
    return torch.eye(3).to_sparse().to("xla")


def on_device() -> Tensor:
    return torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 2), device="xla")


def converted() -> Tensor:
    return torch.eye(3).to("xla").to_sparse()


def gradient() -> None:
    table = nn.Embedding(5, 2, sparse=True).to("xla")
    table(torch.tensor([1, 2]).to("xla")).sum().backward()


@pytest.mark.filterwarnings("ignore:.*invariant checks:UserWarning")
@pytest.mark.parametrize("make", [from_host, on_device, converted, gradient])
def test_sparse_tensors_are_refused_in_words(make: Callable[[], object]) -> None:
    with pytest.raises(
        NotImplementedError, match=r"^\[layout\] got aten::\w+ for a sparse tensor.*to_dense"
    ) as refused:
        make()
    assert len(str(refused.value)) < 300
    assert (torch.ones(2, device="xla") + 1).tolist() == [2, 2]


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_nested_tensors_are_jagged() -> None:
    parts = [torch.ones(2), torch.ones(3)]
    with pytest.raises(NotImplementedError, match=r"^\[layout\] got .* for a nested tensor.*layout=torch.jagged"):
        torch.nested.nested_tensor(parts).to("xla")
    nested = torch.nested.nested_tensor(parts, device="xla", layout=torch.jagged)
    assert (nested + 1).values().tolist() == [2] * 5
