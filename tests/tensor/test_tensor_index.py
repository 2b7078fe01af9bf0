"""Indexing, masks and writes through views: on device xla as on the CPU, values, shapes and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import torch_xla  # noqa: F401

Tensor = torch.Tensor


def grid() -> Tensor:
    return torch.arange(12.0).reshape(3, 4)


def check(call: Callable[[Tensor], Any]) -> None:
    """Asserts that a call gives on xla what it gives on the CPU, dtypes and errors included."""
    try:
        expected = call(grid())
    except Exception as error:
        with pytest.raises(type(error)) as caught:
            call(grid().to("xla"))
        assert str(caught.value).replace("torch.xla.", "torch.") == str(error)
        return
    got = call(grid().to("xla"))
    results = zip(got, expected, strict=True) if isinstance(expected, (tuple, list)) else [(got, expected)]
    for one, other in results:
        assert one.device.type == "xla" and one.dtype == other.dtype
        assert torch.equal(one.cpu(), other)


READS: dict[str, Callable[[Tensor], Any]] = {
    "row": lambda x: x[1],
    "last": lambda x: x[-1],
    "element": lambda x: x[1, 2],
    "numpy integer": lambda x: x[np.int64(1)],
    "tensor scalar": lambda x: x[torch.tensor(1).to(x.device)],
    "slice": lambda x: x[::2, 1:],
    "empty slice": lambda x: x[2:1],
    "ellipsis and new axis": lambda x: x[..., None, 1],
    "true": lambda x: x[True],
    "false": lambda x: x[False],
    "list": lambda x: x[[0, 2]],
    "lists": lambda x: x[[0, 1], [1, 2]],
    "slice and list": lambda x: x[1:, [0, 1]],
    "list of flags": lambda x: x[[True, False, True]],
    "array": lambda x: x[np.array([0, 2])],
    "array of flags": lambda x: x[np.array([True, False, True])],
    "host tensor": lambda x: x[torch.tensor([0, 2])],
    "host tensor behind a slice": lambda x: x[:, torch.tensor([1, 1])],
    "device tensor": lambda x: x[torch.tensor([0, 2]).to(x.device)],
    "negative indices": lambda x: x[[-1, -3]],
    "mask": lambda x: x[x > 4],
    "host mask": lambda x: x[grid() > 4],
    "row mask": lambda x: x[(x > 4).any(1)],
    "row mask and slice": lambda x: x[(x > 4).any(1), :2],
    "mask without a hit": lambda x: x[x > 99],
    "out of range": lambda x: x[5],
    "too many": lambda x: x[0, 0, 0],
    "mask of another shape": lambda x: x[torch.ones(2, 4, dtype=torch.bool).to(x.device)],
    "float index": lambda x: x[torch.tensor([1.0]).to(x.device)],
    "nonzero": torch.nonzero,
    "nonzero as tuple": lambda x: torch.nonzero(x, as_tuple=True),
    "nonzero after an operation": lambda x: torch.nonzero(x - 3),
    "where": lambda x: torch.where(x > 4),
    "where of three": lambda x: torch.where(x > 4, x, 0.0),
    "argwhere": lambda x: torch.argwhere(x > 8),
    "unique": lambda x: torch.unique(x // 3),
    "unique with counts": lambda x: torch.unique(x // 5, return_inverse=True, return_counts=True),
    "unique rows": lambda x: torch.unique(torch.cat([x, x]), dim=0),
    "unique consecutive": lambda x: torch.unique_consecutive(x.flatten() // 4),
    "masked select": lambda x: x.masked_select(x > 4),
    "masked scatter": lambda x: x.masked_scatter(x > 4, x),
    "repeat interleave": lambda x: x.repeat_interleave(torch.tensor([1, 2, 0]).to(x.device), 0),
    "bincount": lambda x: torch.bincount(x.flatten().long() // 3),
    "isin": lambda x: torch.isin(x, x[0]),
    "take": lambda x: x.take(torch.tensor([1, -1]).to(x.device)),
    "rows by iteration": lambda x: torch.stack(list(x)),
    "unbound": lambda x: x.unbind(1),
    "split": lambda x: x.split([1, 2]),
    "combinations": lambda x: torch.combinations(x[0]),
}


@pytest.mark.parametrize("call", READS.values(), ids=READS)
def test_reads(call: Callable[[Tensor], Any]) -> None:
    check(call)


@pytest.mark.compiled(
    "a graph that PyTorch's kernels refuse is compiled, so that values decide alike in all graphs", reads=False
)
def test_an_index_tensor_out_of_range_takes_the_nearest() -> None:
    assert torch.equal(grid().to("xla")[torch.tensor([7])].cpu(), grid()[2:])


Key = Callable[[Tensor], Any]
WRITES: dict[str, tuple[Key, Key]] = {
    "row": (lambda x: 0, lambda x: 1.0),
    "element": (lambda x: (0, 1), lambda x: 2),
    "all": (lambda x: slice(None), lambda x: 3),
    "ellipsis": (lambda x: ..., lambda x: x[0] * 2),
    "true": (lambda x: True, lambda x: 6.0),
    "new axis": (lambda x: (None, 0), lambda x: 1.0),
    "column": (lambda x: (slice(None), 1), lambda x: torch.arange(3.0).to(x.device)),
    "column from the host": (lambda x: (slice(None), 1), lambda x: torch.arange(3.0)),
    "steps": (lambda x: (slice(None, None, 2), slice(1, 3)), lambda x: torch.ones(2, 2).to(x.device)),
    "nothing": (lambda x: slice(0, 0), lambda x: 1.0),
    "overlap with itself": (lambda x: 0, lambda x: x[1]),
    "flag": (lambda x: -1, lambda x: True),
    "other dtypes": (lambda x: 0, lambda x: torch.tensor(3, dtype=torch.int16)),
    "double": (lambda x: 0, lambda x: torch.tensor(3.5, dtype=torch.float64)),
    "mask": (lambda x: x > 4, lambda x: 0.0),
    "mask with values": (lambda x: x > 4, lambda x: x[x > 4] * 2),
    "host mask": (lambda x: x.cpu() > 4, lambda x: 1.0),
    "row mask": (lambda x: (x > 4).any(1), lambda x: -1.0),
    "list": (lambda x: [0, 2], lambda x: 7.0),
    "slice and list": (lambda x: (slice(None), [0, 1]), lambda x: 5.0),
    "array": (lambda x: np.array([1]), lambda x: 8.0),
    "host tensor": (lambda x: torch.tensor([1]), lambda x: 9.0),
    "host tensors": (
        lambda x: (torch.tensor([0, 1]), torch.tensor([1, 2])),
        lambda x: torch.tensor([1.0, 2.0]).to(x.device),
    ),
    "device tensor": (lambda x: torch.tensor([1, 1]).to(x.device), lambda x: 5.0),
    "a list of numbers is no value": (lambda x: 0, lambda x: [1.0, 2.0, 3.0, 4.0]),
    "too many values": (lambda x: 0, lambda x: torch.ones(3).to(x.device)),
}


@pytest.mark.parametrize(("key", "value"), [pytest.param(*case, id=name) for name, case in WRITES.items()])
def test_writes(key: Key, value: Key) -> None:
    def write(x: Tensor) -> Tensor:
        x[key(x)] = value(x)
        return x

    check(write)


def test_augmented_writes() -> None:
    def write(x: Tensor) -> Tensor:
        x[0] += 1
        x[:, 1] *= 2
        x[x > 5] -= 1
        x[0, 0] **= 2
        x[[0, 1]] += 1
        x[[2, 2]] += 1
        return x

    check(write)


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "transposed row": lambda x: x.t()[0].add_(1),
    "flat range": lambda x: x.view(-1)[3:5].zero_(),
    "column": lambda x: x.select(1, 1).mul_(2),
    "windows": lambda x: x.unfold(1, 2, 2).mul_(2),
    "diagonal": lambda x: x.diagonal().fill_(-1),
    "half": lambda x: x.chunk(2, 1)[1].add_(1),
    "strided": lambda x: x.as_strided((2,), (5,), 1).zero_(),
    "view of a view": lambda x: x[1:].t()[::2].neg_(),
    "narrow": lambda x: x.narrow(0, 1, 2).clamp_(max=6),
    "masked fill": lambda x: x.masked_fill_(x > 3, 0),
    "index fill": lambda x: x.index_fill_(0, torch.tensor([0]).to(x.device), 2),
    "index add": lambda x: x.index_add_(0, torch.tensor([0, 0]).to(x.device), x[:2].clone()),
    "scatter": lambda x: x.scatter_(1, torch.tensor([[0], [1], [2]]).to(x.device), 9.0),
    "index put": lambda x: x.index_put_((torch.tensor([0, 0]).to(x.device),), x[0].clone(), accumulate=True),
    "put": lambda x: x.put_(torch.tensor([1]).to(x.device), torch.tensor([5.0]).to(x.device)),
    "copy of itself turned": lambda x: x.copy_(x.flip(0)),
    "transposed in place": lambda x: x.t_().add_(torch.ones(3).to(x.device)),
    "resized": lambda x: x.resize_(2, 2),
    "triangle": lambda x: x.triu_(),
    "fill diagonal": lambda x: x.fill_diagonal_(3),
}


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
def test_writes_through_views(change: Callable[[Tensor], Any]) -> None:
    def write(x: Tensor) -> Tensor:
        other = x[1]
        change(x)
        return [x, other] if x.shape[0] == 3 else [x]  # type: ignore[return-value]

    check(write)


def test_an_expanded_tensor_takes_no_writes() -> None:
    check(lambda x: x[:1].expand(3, 4).add_(1))
