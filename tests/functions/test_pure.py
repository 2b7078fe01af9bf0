"""`torch_xla.experimental.assume_pure`: functions that are traced once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import Counting

import torch_xla
from torch_xla.experimental.assume_pure import PureModule, assume_pure, assume_pure_torch


class Doubled(torch.autograd.Function):
    """Squares, with a gradient that cannot be derived from that."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * ctx.saved_tensors[0] * 3


def gradients(function: Any, *tensors: torch.Tensor) -> list[torch.Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    result = function(*leaves)
    result.pow(2).sum().backward()
    return [result.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[misc]


def test_values_and_gradients_are_those_of_the_function_which_is_traced_once(counted: Counting) -> None:
    calls = 0

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        c = torch.sin(a @ b)
        c.add_(1)  # a value of its own may be written
        return torch.nn.functional.layer_norm(Doubled.apply(c), (3,)) * b.detach()

    a, b = torch.randn(3, 3), torch.randn(3, 3)
    expected = gradients(function, a, b)
    calls = 0
    pure = assume_pure(function)
    for _ in range(3):
        with counted("UncachedCompile") as compiled:
            result = gradients(pure, a.to("xla"), b.to("xla"))
            torch_xla.sync()
        for ours, theirs in zip(result, expected, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs)
    assert calls == 1
    assert compiled.value == 0
    with torch.no_grad():
        torch.testing.assert_close(pure(a.to("xla"), b.to("xla")).cpu(), function(a, b))


def test_operators_of_the_host_are_told_apart(counted: Counting) -> None:
    x = torch.linspace(0.5, 2, 5)
    for op in (torch.special.airy_ai, torch.special.bessel_y0):
        pure, module = assume_pure(lambda a, op=op: op(a)), PureModule(_Calling(op))
        for function in (pure, module):
            torch.testing.assert_close(function(x.to("xla")).cpu(), op(x))
    with counted("UncachedCompile", 0):
        torch.testing.assert_close(assume_pure(lambda a: op(a))(x.to("xla")).cpu(), op(x))


class _Calling(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def test_the_sign_of_zero_is_part_of_the_signature() -> None:
    pure = assume_pure(torch.div)
    for zero in (0.0, -0.0):
        torch.testing.assert_close(pure(torch.ones(2).to("xla"), zero).cpu(), torch.ones(2) / zero)


def test_any_nest_of_arguments_and_results() -> None:
    @assume_pure
    def function(pair: dict[str, torch.Tensor], scale: float, *, name: str) -> tuple[dict[str, Any], int]:
        return {name: pair["x"] * scale, "rank": pair["x"].dim(), "mask": pair["y"] > 0}, 7

    x = torch.randn(4, device="xla", requires_grad=True)
    y = torch.randn(4, device="xla")
    for scale in (2.0, 3.0):
        result, seven = function({"x": x, "y": y}, scale, name="out")
        assert (seven, result["rank"]) == (7, 1)
        assert result["out"].requires_grad and not result["mask"].requires_grad
        torch.testing.assert_close(result["out"].detach().cpu(), x.detach().cpu() * scale)
        assert torch.equal(result["mask"].cpu(), y.cpu() > 0)


def test_random_numbers_are_new_at_every_call_and_follow_a_seed() -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x, 0.5) + torch.rand_like(x)

    x = torch.ones(64, device="xla", requires_grad=True)
    pure = assume_pure(noisy)
    assert not torch.equal(pure(x).cpu(), pure(x).cpu())
    torch.manual_seed(3)
    first = pure(x).cpu()
    torch.manual_seed(3)
    assert torch.equal(first, pure(x).cpu())
    seeded = assume_pure(noisy, add_rng_seed_argument=True)
    one, same, other = (seeded(x, rng_seed=s).cpu() for s in (1, torch.tensor(1), 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    out = seeded(x, rng_seed=5)
    out.sum().backward()  # dropout's mask is that of the forward pass
    kept = seeded(x, rng_seed=5).detach().cpu() >= 2
    assert torch.equal(x.grad.cpu() == 2, kept)  # type: ignore[union-attr]


def test_module_with_its_modes_buffers_and_tied_parameters() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(4, 4)
            self.second = torch.nn.Linear(4, 4)
            self.second.weight = self.first.weight
            self.norm = torch.nn.BatchNorm1d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.second(torch.nn.functional.dropout(self.first(x), 0.5, self.training)))

    module = Tied().eval().to("xla")
    x = torch.randn(5, 4, device="xla")
    expected = module(x)
    expected.sum().backward()
    grads = [p.grad.cpu() for p in module.parameters()]
    module.zero_grad()
    pure = PureModule(module)
    result = pure(x)
    result.sum().backward()
    torch.testing.assert_close(result.detach().cpu(), expected.detach().cpu())
    for p, grad in zip(module.parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad.cpu(), grad)
    module.train()
    with pytest.raises(RuntimeError, match=r"\[assume_pure\] the function writes to its argument"):
        pure(x)


def test_pure_functions_inside_others_and_tensors_from_outside() -> None:
    offset = torch.ones(3, device="xla")
    inner = assume_pure_torch(lambda a: a @ a)
    outer = assume_pure_torch(lambda a: inner(a) + offset, use_cache=True)
    a = torch.randn(3, 3)
    torch.testing.assert_close(outer(a.to("xla")).cpu(), a @ a + 1)
    offset += 1
    torch.testing.assert_close(outer(a.to("xla")).cpu(), a @ a + 2)


def test_what_is_not_pure_is_refused() -> None:
    x = torch.randn(3, device="xla", requires_grad=True)
    weight = torch.randn(3, device="xla", requires_grad=True)
    with pytest.raises(RuntimeError, match="from outside that requires a gradient"):
        assume_pure(lambda a: a * weight)(x)
    with pytest.raises(RuntimeError, match="writes to its argument 0"):
        assume_pure(lambda a: a.add_(1))(x.detach())
    with pytest.raises(TypeError, match=r"\[assume_pure\] an argument cannot be told from others"):
        assume_pure(lambda a, b: a)(x, {1, 2})
