"""Layouts that the device does not have are refused in two lines, at the call, and the next call works."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import torch_xla


def from_host() -> Tensor:
    return torch.eye(3).to_sparse().to("xla")


def on_device() -> Tensor:
    return torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 2), device="xla")


def converted() -> Tensor:
    return torch.eye(3).to("xla").to_sparse()


@pytest.mark.filterwarnings("ignore:.*invariant checks:UserWarning")
@pytest.mark.parametrize("make", [from_host, on_device, converted])
def test_sparse_tensors_are_refused_in_words(make: Callable[[], object]) -> None:
    with pytest.raises(
        NotImplementedError, match=r"^\[layout\] got aten::\w+ for a sparse tensor.*to_dense"
    ) as refused:
        make()
    assert len(str(refused.value)) < 300
    assert (torch.ones(2, device="xla") + 1).tolist() == [2, 2]


def looked_up(device: str, sparse: bool) -> Tensor:
    table = nn.Embedding(5, 2, padding_idx=3, sparse=sparse, _weight=torch.arange(10.0).view(5, 2)).to(device)
    (table(torch.tensor([[1, 2], [1, 3]]).to(device)) ** 2).sum().backward()
    return table.weight.grad


def looked_up_in_bags(device: str, sparse: bool) -> Tensor:
    table = nn.EmbeddingBag(5, 2, mode="mean", sparse=sparse, _weight=torch.arange(10.0).view(5, 2)).to(device)
    (table(torch.tensor([[1, 2], [1, 3]]).to(device)) ** 2).sum().backward()
    return table.weight.grad


def gathered(device: str, sparse: bool) -> Tensor:
    x = torch.arange(6.0, device=device).view(2, 3).requires_grad_()
    (x.gather(1, torch.tensor([[0, 0], [2, 1]]).to(device), sparse_grad=sparse) ** 2).sum().backward()
    return x.grad


@pytest.mark.parametrize("gradient", [looked_up, looked_up_in_bags, gathered])
def test_sparse_gradients_are_dense_here(gradient: Callable[[str, bool], Tensor]) -> None:
    expected = gradient("cpu", True)
    assert expected.is_sparse
    for sparse in (False, True):
        result = gradient("xla", sparse)
        torch_xla.sync()
        assert result.layout is torch.strided
        assert torch.equal(result.cpu(), expected.to_dense())


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
def test_nested_tensors_are_jagged() -> None:
    parts = [torch.ones(2), torch.ones(3)]
    with pytest.raises(NotImplementedError, match=r"^\[layout\] got .* for a nested tensor.*layout=torch.jagged"):
        torch.nested.nested_tensor(parts).to("xla")
    nested = torch.nested.nested_tensor(parts, device="xla", layout=torch.jagged)
    assert (nested + 1).values().tolist() == [2] * 5


@pytest.mark.filterwarnings("ignore:.*nested tensors:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nested.as_nested_tensor([torch.ones(2, device="xla"), torch.ones(3, device="xla")]),
        lambda: torch._nested_tensor_from_mask(torch.ones(1, 2, 3, device="xla"), torch.ones(1, 2).bool().to("xla")),
        lambda: attention([torch.ones(n, 2, 4, device="xla") for n in (3, 5)]),
    ],
)
def test_nested_tensors_with_strides_are_refused_in_words(make: Callable[[], object]) -> None:
    with pytest.raises(RuntimeError, match=r"^\[layout\] got aten::_nested_tensor_from_\w+ on .*to_padded_tensor"):
        make()


def attention(parts: list[Tensor]) -> Tensor:
    q = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    return nn.functional.scaled_dot_product_attention(q, q, q)
