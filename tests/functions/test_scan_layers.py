"""Scans, scanned layers and accumulated gradients against Python loops on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Counting
from functorch.compile import min_cut_rematerialization_partition
from torch.utils import _pytree as pytree

import torch_xla
from torch_xla.experimental.gradient_accumulation import gradient_accumulation
from torch_xla.experimental.scan import scan, tree_flatten_none, value_and_grad_partitioned
from torch_xla.experimental.scan_layers import scan_layers


def loop(fn: Callable[..., Any], init: Any, xs: Any) -> tuple[Any, Any]:
    carry, ys = init, []
    for i in range(len(pytree.tree_leaves(xs)[0])):
        carry, y = fn(carry, pytree.tree_map(lambda x, i=i: x[i], xs))
        ys.append(y)
    return carry, pytree.tree_map(lambda *leaves: torch.stack(leaves), *ys)


def check(fn: Callable[..., Any], init: Any, xs: Any, **options: Any) -> None:
    """Compares results and gradients; the first leaf of `init` and all of `xs` may require gradients."""

    def run(device: str, function: Callable[..., Any]) -> list[Any]:
        def moved(x: torch.Tensor) -> torch.Tensor:
            return x.detach().to(device, copy=True).requires_grad_(x.requires_grad)

        start, slices = pytree.tree_map(moved, init), pytree.tree_map(moved, xs)
        results = function(fn, start, slices)
        leaves = pytree.tree_leaves(results)
        sum((leaf * leaf).sum() for leaf in leaves if leaf.requires_grad).backward()
        inputs = pytree.tree_leaves((start, slices))
        return [*(leaf.detach().cpu() for leaf in leaves), *(x.grad.cpu() for x in inputs if x.requires_grad)]

    ours = run("xla", lambda *args: scan(*args, **options))
    torch.testing.assert_close(ours, run("cpu", loop))


def numbers(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape).requires_grad_(grad)


@pytest.mark.parametrize("partition", [None, min_cut_rematerialization_partition])
def test_values_and_gradients(partition: Any) -> None:
    scale = torch.tensor(0.5)

    def fn(carry: Any, x: Any) -> Any:
        h, count = carry
        h = torch.tanh(h @ x["w"] + x["b"])
        y = h.clone()
        y.mul_(scale.to(y.device))
        return (h, count + 1), (y.sin(), [x["b"], count])

    init = (numbers(2, 3), torch.tensor(0))
    options = {} if partition is None else {"partition_fn": partition}
    check(fn, init, {"w": numbers(4, 3, 3), "b": numbers(4, 3, grad=False)}, **options)


def test_a_carry_that_needs_no_gradient_at_first_and_results_without_gradient() -> None:
    check(lambda c, x: (c + x.exp(), (c.detach() * 2, x)), numbers(3, grad=False), numbers(5, 3))
    check(lambda c, x: (c.detach() + 1, x * c), numbers(3), numbers(5, 3))


def test_compile_time_does_not_grow_and_a_pure_function_is_traced_once(compiles: Counting) -> None:
    calls = 0

    def fn(carry: torch.Tensor, x: torch.Tensor) -> Any:
        nonlocal calls
        calls += 1
        return carry * x, None

    xs = torch.rand(50, 2).to("xla").requires_grad_()
    with compiles(1):
        for _ in range(3):
            xs.grad = None
            carry, nothing = scan(fn, torch.ones(2, device="xla"), xs, is_fn_pure=True)
            carry.sum().backward()
            torch_xla.sync()
    assert nothing is None
    assert calls == 1
    torch.testing.assert_close(xs.grad.cpu(), xs.detach().cpu().prod(0) / xs.detach().cpu())  # type: ignore[union-attr]


def test_random_numbers_differ_from_turn_to_turn() -> None:
    def fn(carry: torch.Tensor, x: torch.Tensor) -> Any:
        return carry, torch.nn.functional.dropout(x, 0.5)

    xs = torch.ones(4, 64, device="xla", requires_grad=True)
    _, ys = scan(fn, torch.zeros(1, device="xla"), xs)
    ys.sum().backward()
    assert torch.equal(xs.grad.cpu(), ys.detach().cpu())  # type: ignore[union-attr]
    assert len({tuple(row.tolist()) for row in ys.detach().cpu()}) == 4


def test_a_turn_and_its_gradients_as_functions() -> None:
    offset = torch.randn(3)

    def step(carry: Any, x: Any) -> Any:
        after = (carry["a"] @ x["w"] + offset.to(carry["a"].device)).tanh()
        return {"a": after}, (after.sin() * x["k"], None)

    init = {"a": torch.randn(2, 3, requires_grad=True)}
    xs = {"w": torch.randn(4, 3, 3, requires_grad=True), "k": torch.randn(4, 3)}

    def leaves(tree: Any, device: str) -> Any:
        return pytree.tree_map(lambda t: t.detach().to(device).requires_grad_(t.requires_grad), tree)

    def slice_of(i: int) -> Any:
        return {name: x[i] for name, x in on_device.items()}

    start, on_device = leaves(init, "xla"), leaves(xs, "xla")
    forward, alias_input, backward = value_and_grad_partitioned(step, start, on_device)
    carry, kept, total = start, [], 0.0
    with torch.no_grad():
        for i in range(4):
            carry, ((y, none), partial) = forward(carry, slice_of(i))
            assert none is None
            kept.append(alias_input(partial, slice_of(i)))
            total = total + y.sum()
        grad = {"a": torch.ones_like(carry["a"])}
        of_w = []
        for values in reversed(kept):
            grad, of_x = backward(grad, ((torch.ones_like(y), None), values))
            assert of_x["k"] is None
            of_w.append(of_x["w"].cpu())
    after, expected = init, 0.0
    for i in range(4):
        after, (y, _) = step(after, {name: x[i] for name, x in xs.items()})
        expected = expected + y.sum()
    (expected + after["a"].sum()).backward()
    torch.testing.assert_close(total.cpu(), expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.stack(of_w[::-1]), xs["w"].grad, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(grad["a"].cpu(), init["a"].grad, rtol=1e-4, atol=1e-5)
    flat, again = tree_flatten_none(((1, None), [2]))
    assert flat == [1, 2] and again([3, 4]) == ((3, None), [4])


def test_a_turn_may_write_to_what_it_is_given() -> None:
    def add(total: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total += x
        x.mul_(2)
        return total, total + x

    start, xs = torch.tensor([5.0], device="xla"), torch.tensor([[1.0], [2.0], [3.0]], device="xla")
    total, sums = scan(add, start, xs)
    assert total.tolist() == [11.0]
    assert sums.tolist() == [[8.0], [12.0], [17.0]]
    assert start.tolist() == [5.0] and xs.tolist() == [[1.0], [2.0], [3.0]]


def test_wrong_use_is_refused() -> None:
    one, two = torch.ones(3, 2, device="xla"), torch.ones(2, 2, device="xla")
    with pytest.raises(ValueError, match="must be callable"):
        scan(7, one[0], one)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="same leading dimension size"):
        scan(lambda c, x: (c, None), one[0], (one, two))
    with pytest.raises(ValueError, match="xs has no tensors"):
        scan(lambda c, x: (c, None), one[0], ())
    with pytest.raises(RuntimeError, match=r"\[scan\] fn returned the carry .*float64"):
        scan(lambda c, x: (c.double(), None), one[0], one)
    with pytest.raises(RuntimeError, match="in-place operation"):
        scan(lambda c, x: (c.add_(x), None), one[0].clone().requires_grad_(), one)
    with pytest.raises(RuntimeError, match="writes to a tensor from outside"):
        scan(lambda c, x: (c + two[0].add_(x), None), one[0], one)
    weight = torch.ones(2, device="xla", requires_grad=True)
    with pytest.raises(RuntimeError, match="requires a gradient"):
        scan(lambda c, x: (c * weight, None), one[0], one)


@pytest.mark.costs("whole models are compiled")
def test_layers_as_one(compiles: Counting) -> None:
    layers = [torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(4)]
    ours = [copy.deepcopy(layer).to("xla") for layer in layers]
    x = torch.randn(2, 5, 8)
    expected = torch.nn.Sequential(*layers)(x)
    expected.square().sum().backward()
    with compiles(1):
        for _ in range(2):
            for layer in ours:
                layer.zero_grad()
            result = scan_layers(ours, x.to("xla"), is_layer_pure=True)
            result.square().sum().backward()
            torch_xla.sync()
    torch.testing.assert_close(result.detach().cpu(), expected.detach())
    for mine, theirs in zip(ours, layers, strict=True):
        for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(p.grad.cpu(), q.grad, rtol=1e-4, atol=1e-4)
    assert scan_layers([], 5) == 5
    with pytest.raises(ValueError, match="Shape mismatch for 'weight' in layer 1"):
        scan_layers([torch.nn.Linear(2, 2).to("xla"), torch.nn.Linear(2, 3).to("xla")], x)
    with pytest.raises(ValueError, match="Layer 1 has mismatched keys"):
        scan_layers([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False)], x)


def test_accumulated_gradients_are_those_of_a_python_loop(compiles: Counting) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    model[0].bias.requires_grad_(False)  # type: ignore[union-attr]
    ours = copy.deepcopy(model).to("xla")
    data, target = torch.randn(3, 6, 4), torch.randn(3, 6, 2)

    def step_of(module: torch.nn.Module) -> Callable[..., Any]:
        return lambda x, y, seen: (torch.nn.functional.mse_loss(module(x), y), seen + len(x))

    losses, seen = [], torch.tensor(0)
    for _ in range(2):
        for x, y in zip(data, target, strict=True):
            loss, seen = step_of(model)(x, y, seen)
            (loss / 3).backward()
            losses.append(loss.detach())
    count = torch.tensor(0, device="xla")
    with compiles() as compiled:
        for _ in range(2):
            mean, count = gradient_accumulation(step_of(ours), (data.to("xla"), target.to("xla")), ours, count)
            torch_xla.sync()
    assert compiled.value <= 2  # the second adds to gradients that are there
    torch.testing.assert_close(mean.cpu(), torch.stack(losses[3:]).mean())
    assert count.item() == seen.item()
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(tensor.cpu(), model.state_dict()[name])
    for p, q in zip(ours.parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None:
            torch.testing.assert_close(p.grad.cpu(), q.grad)  # type: ignore[union-attr]


def test_accumulation_refuses_what_it_cannot_do() -> None:
    model = torch.nn.Linear(2, 2).to("xla")
    x = torch.ones(3, 4, 2, device="xla")
    with pytest.raises(ValueError, match="iterable_tensors is empty"):
        gradient_accumulation(lambda: None, [], model)
    with pytest.raises(ValueError, match="has the first size 2"):
        gradient_accumulation(lambda a, b: None, (x, x[:2]), model)
    with pytest.raises(ValueError, match="is a int"):
        gradient_accumulation(lambda a, b: None, (x, 3), model)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="writes to its argument"):
        gradient_accumulation(lambda a, c: (model(a).sum(), c.add_(1)), (x,), model, x[0])
    with pytest.raises(RuntimeError, match="returned 0 carried values"):
        gradient_accumulation(lambda a, c: (model(a).sum(),), (x,), model, x[0])
