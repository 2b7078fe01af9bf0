"""Views by operators of others, of which only the strides of their results are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import exactly, on_both
from torch import Tensor

import torch_xla  # noqa: F401

VIEWS: dict[str, tuple[str, Callable[..., object]]] = {
    "tail": ("Tensor(a)", lambda x: x[1:]),
    "flipped": ("Tensor(a)", lambda x: x.t()),
    "evens": ("Tensor(a)", lambda x: x[:, ::2]),
    "corner": ("Tensor(a)", lambda x: x[1:, 1:].t()),
    "rows": ("Tensor(a)[]", lambda x: list(x.unbind(0))),
    "bits": ("Tensor(a)", lambda x: x.view(torch.int32)),
    "diagonal": ("Tensor(a)", lambda x: x.diagonal()),
    "same": ("Tensor(a)", lambda x: x.view_as(x)),
}
NO_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": lambda x: x.clone(),
    "conjugate": lambda x: x.conj(),
}
LIBRARY = torch.library.Library("tests_other_views", "DEF")
for name, (result, view) in VIEWS.items():
    LIBRARY.define(f"{name}(Tensor(a) x) -> {result}")
    for key in ("CPU", "Meta"):
        LIBRARY.impl(name, view, key)
for name, no_view in NO_VIEWS.items():
    LIBRARY.define(f"{name}(Tensor(a) x) -> Tensor(a)")
    for key in ("CPU", "Meta"):
        LIBRARY.impl(name, no_view, key)
LIBRARY.define("untold(Tensor(a) x) -> Tensor(a)")
LIBRARY.impl("untold", lambda x: x[1:], "CPU")
OPS = torch.ops.tests_other_views
as_on_cpu = on_both(exactly)

BASES: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x,
    "part": lambda x: x[:, 1:4],
    "transposed": lambda x: x.t(),
}


@pytest.mark.parametrize("of", BASES.values(), ids=list(BASES))
def test_what_is_written_to_a_view_is_in_its_base(of):
    def program(device: str) -> list[Tensor]:
        shown = []
        for name in list(VIEWS):
            x = torch.arange(20.0, device=device).reshape(4, 5)
            views = getattr(OPS, name)(of(x))
            for i, v in enumerate(views if isinstance(views, list) else [views]):
                v.mul_(2).add_(i)
                x.add_(1)  # the view follows its base
                shown.append(v)
            shown.append(x)
        return shown

    for got, expected in zip(program("xla"), program("cpu"), strict=True):
        assert got.stride() == expected.stride() and torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("name", list(NO_VIEWS))
def test_what_is_no_view_by_strides_is_refused_where_it_is_made(name):
    x = torch.ones(2, dtype=torch.complex64, device="xla")
    with pytest.raises(RuntimeError, match=r"\[record tests_other_views.*expected a view of it by strides"):
        getattr(OPS, name)(x)


def test_a_view_without_a_meta_kernel_is_refused():
    with pytest.raises(NotImplementedError, match=r"\[record tests_other_views::untold\] is a view"):
        OPS.untold(torch.ones(2, device="xla"))


@as_on_cpu
def test_prims(device: str) -> Any:
    x = torch.arange(6.0, device=device).reshape(2, 3)
    views = [torch.ops.prims.transpose(x, [1, 0]), torch.ops.prims.split_dim(x, 1, 3)]
    for v in views:
        v.mul_(3)
    return [x, *views]


@as_on_cpu
def test_memory_of_a_conjugate_is_shown_conjugated(device: str) -> Any:
    x = torch.arange(4.0, device=device) * (1 + 1j)
    part = x.conj().as_strided((2,), (2,))
    part.mul_(1j)
    return [x, part]
