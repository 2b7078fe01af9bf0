"""Operators whose kernels take arguments uncounted: every reference to a tensor must still be let go of once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from oracle import cut

import torch_xla
from torch_xla import _bindings


def overloads() -> list[torch._ops.OpOverload]:
    results = []
    for name in sorted(_bindings.unboxed_kernels()):
        op, _, overload = name.removeprefix("aten::").partition(".")
        results.append(getattr(getattr(torch.ops.aten, op), overload or "default"))
    return results


@pytest.mark.parametrize("op", overloads(), ids=str)
def test_they_are_plain_operators_and_views(op: torch._ops.OpOverload) -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "XLA")
    tags = {torch.Tag.inplace_view, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
    assert not tags & set(op.tags)
    kinds = [str(value.type) for value in (*op._schema.arguments, *op._schema.returns)]
    assert not [kind for kind in kinds if kind.startswith("List[") and "Tensor" in kind]


def uses(*tensors: torch.Tensor) -> list[int]:
    return [t._use_count() for t in tensors]


# Twice each: the first call of a signature goes another way than those that follow.
CALLS: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "a tensor": lambda x, y: x + y,
    "a number": lambda x, y: x * 2.5,
    "a tensor of the host": lambda x, y: x + torch.tensor(2.0),
    "written": lambda x, y: x.mul_(y),
    "written by a number": lambda x, y: x.add_(1.5),
    "a view": lambda x, y: x[1:, 0],
    "written through a view": lambda x, y: x[0].add_(y[0]),
    "optional tensors": lambda x, y: torch.nn.functional.linear(x, y),
    "three results": lambda x, y: torch.ops.aten.native_layer_norm(x, [4], y[0], None, 1e-5),
    "itself": lambda x, y: torch.where(x > x, x, x),
}
REFUSED: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "shapes": lambda x, y: torch.mm(x, y[:3]),
    "host": lambda x, y: x * torch.ones(4, 4),
    "written shape": lambda x, y: x.add_(y.expand(5, 4, 4)),
    "overlap": lambda x, y: x[0].expand(4, 4).mul_(y),
    "view": lambda x, y: x.view(3, 3),
}


@pytest.mark.parametrize("eager", [False, True], ids=["lazy", "eager"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_references_are_as_before(call: Callable[..., object], eager: bool) -> None:
    x, y = (torch.randn(4, 4).to("xla") for _ in range(2))
    with torch_xla.experimental.eager_mode_context(eager):
        for _ in range(3):
            call(x, y)
            assert uses(x, y) == [1, 1]
    torch_xla.sync()
    assert uses(x, y) == [1, 1]


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_references_are_as_before_where_it_raises(call: Callable[..., object]) -> None:
    x, y = (torch.randn(4, 4).to("xla") for _ in range(2))
    for _ in range(3):
        with pytest.raises(RuntimeError):
            call(x, y)
        assert uses(x, y) == [1, 1]
    assert (x + y).isfinite().all()


def test_a_call_like_one_before_is_the_same_node() -> None:
    x, y = (torch.randn(4, 4, device="xla") for _ in range(2))
    first, second = cut(torch.add(x, y, alpha=2)), cut(torch.add(x, y, alpha=2))
    assert first.key == second.key
    assert [node.op for node in second.nodes][-1] == "aten.add.Tensor"


def test_tensors_are_gone_when_python_has_dropped_them() -> None:
    x = torch.randn(4, 4).to("xla")
    living = _bindings.created_tensors() - _bindings.destroyed_tensors()
    for _ in range(5):
        torch.nn.functional.layer_norm((x @ x).relu(), [4]).view(2, 8)[0]
    assert _bindings.created_tensors() - _bindings.destroyed_tensors() == living
