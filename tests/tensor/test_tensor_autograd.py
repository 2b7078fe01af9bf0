"""Gradients, hooks, functional transforms, checkpoints and seeds on device xla."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_xla
import torch_xla.core.xla_model as xm


def leaf(*values: float) -> torch.Tensor:
    return torch.tensor(values).to("xla").requires_grad_()


def gradient(x: torch.Tensor) -> list[float]:
    assert x.grad is not None and x.grad.device == x.device
    return x.grad.tolist()


class TestGradients:
    def test_leaves(self) -> None:
        assert leaf(1.0).is_leaf
        assert not (leaf(1.0) * 2).is_leaf
        assert not torch.tensor([1.0], requires_grad=True).to("xla").is_leaf
        assert torch.tensor([1.0], device="xla", requires_grad=True).is_leaf

    def test_backward_accumulates(self) -> None:
        x = leaf(1.0, 2.0)
        for _ in range(2):
            x.square().sum().backward()
        assert gradient(x) == [4.0, 8.0]

    def test_across_devices(self) -> None:
        host = torch.tensor([1.0, 2.0], requires_grad=True)
        host.to("xla").square().cpu().sum().backward()
        assert host.grad is not None and host.grad.tolist() == [2.0, 4.0]

    def test_assigned_gradients_are_checked(self) -> None:
        x = leaf(1.0, 2.0)
        x.grad = torch.zeros_like(x)
        with pytest.raises(RuntimeError, match="attempting to assign a gradient with device type 'cpu'"):
            x.grad = torch.zeros(2)
        with pytest.raises(RuntimeError, match="attempting to assign a gradient of size"):
            x.grad = torch.zeros(3, device="xla")

    def test_in_place_on_a_leaf(self) -> None:
        x = leaf(1.0, 2.0)
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            x.add_(1)
        for view in (x[0], x.view(2, 1), x.detach().requires_grad_()[:1]):
            with pytest.raises(RuntimeError, match="a view of a leaf Variable that requires grad"):
                view.add_(1)
        with torch.no_grad():
            x.add_(1)
        assert x.tolist() == [2.0, 3.0] and not x.is_inference()

    def test_in_place_on_a_view_of_a_result(self) -> None:
        x = leaf(1.0, 2.0)
        y = x * 2
        y[0].mul_(3)
        y.sum().backward()
        assert gradient(x) == [6.0, 2.0]

    def test_in_place_on_what_backward_needs(self) -> None:
        y = leaf(1.0, 2.0).exp()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    def test_retained_and_double(self) -> None:
        x = leaf(1.0, 2.0)
        y = x**3
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True, retain_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, retain_graph=True)
        y.retain_grad()
        y.sum().backward()
        assert (first.tolist(), second.tolist()) == ([3.0, 12.0], [6.0, 12.0])
        assert gradient(y) == [1.0, 1.0]

    def test_hooks(self) -> None:
        x, seen = leaf(1.0, 2.0), []
        handle = x.register_hook(lambda grad: grad * 2)
        x.register_post_accumulate_grad_hook(lambda parameter: seen.append(gradient(parameter)))
        x.sum().backward()
        handle.remove()
        x.sum().backward()
        assert seen == [[2.0, 2.0], [3.0, 3.0]]

    def test_modes(self) -> None:
        x = leaf(1.0, 2.0)
        with torch.no_grad():
            assert not (x * 2).requires_grad
        with torch.inference_mode():
            y = x * 2
            y[0] = 7
        assert y.is_inference() and y.tolist() == [7.0, 4.0]
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            x * y

    def test_gradcheck(self) -> None:
        x = torch.rand(3, dtype=torch.float64, device="xla").requires_grad_()
        assert torch.autograd.gradcheck(lambda t: (t * t).sin(), (x,))

    def test_a_function_of_the_user(self) -> None:
        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(x)
                return x * 2

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                return grad * ctx.saved_tensors[0]

        x = leaf(3.0)
        Double.apply(x).sum().backward()
        assert gradient(x) == [3.0]

    def test_clipping(self) -> None:
        x = leaf(3.0, 4.0)
        x.grad = x.detach().clone()
        assert nn.utils.clip_grad_norm_([x], 1.0).item() == pytest.approx(5.0)
        assert gradient(x) == pytest.approx([0.6, 0.8], rel=1e-4)


class TestTransforms:
    def test_grad_and_vmap(self) -> None:
        x = torch.tensor([1.0, 2.0]).to("xla")
        assert torch.func.grad(lambda t: t.square().sum())(x).tolist() == [2.0, 4.0]
        assert torch.func.vmap(lambda t: t * 2)(x).tolist() == [2.0, 4.0]
        assert torch.func.jacrev(lambda t: t.square())(x).tolist() == [[2.0, 0.0], [0.0, 4.0]]

    def test_gradients_of_each_sample(self) -> None:
        weight, samples = torch.ones(2, 3), torch.arange(12.0).reshape(4, 3)

        def loss(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return (w @ x).square().sum()

        each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))
        torch.testing.assert_close(each(weight.to("xla"), samples.to("xla")).cpu(), each(weight, samples))

    def test_functional_call(self) -> None:
        values = {"weight": torch.ones(1, 2, device="xla"), "bias": torch.zeros(1, device="xla")}
        x = torch.tensor([1.0, 2.0]).to("xla")
        assert torch.func.functional_call(nn.Linear(2, 1).to("xla"), values, (x,)).tolist() == [3.0]


class TestCheckpoint:
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_gradients(self, reentrant: bool) -> None:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).to("xla")
        x = torch.randn(3, 4, device="xla", requires_grad=True)
        module(x).sum().backward()
        expected = gradient(x)
        x.grad = None
        checkpoint(module, x, use_reentrant=reentrant).sum().backward()
        torch.testing.assert_close(torch.tensor(gradient(x)), torch.tensor(expected))

    @pytest.mark.parametrize("reentrant", [False, True])
    @pytest.mark.parametrize("cut", [False, True])
    def test_dropout_repeats_itself(self, reentrant: bool, cut: bool) -> None:
        x = torch.ones(256, device="xla", requires_grad=True)
        y = checkpoint(nn.Dropout(0.5), x, use_reentrant=reentrant)
        if cut:
            torch_xla.sync()
        y.sum().backward()
        assert gradient(x) == y.tolist()


@pytest.fixture(autouse=True)
def seeds_restored() -> Iterator[None]:
    host, device = torch.get_rng_state(), xm.get_rng_state()
    yield
    torch.set_rng_state(host)
    xm.set_rng_state(device)


def draw(**options: Any) -> list[float]:
    return torch.rand(4, device="xla", **options).tolist()


class TestSeeds:
    @pytest.mark.parametrize(
        "seed", [torch.manual_seed, torch_xla.manual_seed, xm.set_rng_state, torch.default_generator.manual_seed]
    )
    def test_the_same_seed_again_gives_the_same_numbers(self, seed: Callable[[int], Any]) -> None:
        seed(3)
        first, second = draw(), draw()
        assert first != second
        seed(3)
        assert [draw(), draw()] == [first, second]
        seed(3)
        seed(3)
        assert draw() == first
        seed(4)
        assert draw() != first

    def test_all_kinds_of_draws_follow_the_seed(self) -> None:
        def draws() -> list[Any]:
            torch.manual_seed(5)
            x = torch.empty(3, device="xla")
            made = [
                torch.randn(2, device="xla"),
                torch.randint(100, (3,), device="xla"),
                torch.randperm(9, device="xla"),
            ]
            made += [
                torch.nn.functional.dropout(torch.ones(9, device="xla")),
                x.uniform_().clone(),
                x.normal_().clone(),
            ]
            return [t.tolist() for t in [*made, torch.bernoulli(torch.full((9,), 0.5, device="xla"))]]

        assert draws() == draws()

    def test_the_same_seed_counts_when_the_host_drew_since(self) -> None:
        runs = []
        for _ in range(2):
            torch.manual_seed(3)
            torch.nn.Linear(4, 4)
            runs.append([draw(), torch.randn(5).tolist(), draw()])
        assert runs[0] == runs[1]

    def test_host_numbers_are_left_alone(self) -> None:
        def host() -> list[list[float]]:
            drawn = [
                torch.rand(3),
                torch.randn(3),
                torch.randn(3, dtype=torch.float64),
                torch.randn(20),
                torch.randperm(9),
            ]
            drawn += [torch.empty(3).log_normal_(), torch.empty(3).cauchy_(), torch.empty(3).exponential_()]
            drawn += [torch.poisson(torch.ones(3)), torch._standard_gamma(torch.ones(3)), torch.ones(9).multinomial(3)]
            return [value.tolist() for value in drawn]

        torch.manual_seed(0)
        expected = [host(), host()]
        torch.manual_seed(0)
        results = []
        for _ in range(2):
            draw()
            results.append(host())
        assert results == expected

    def test_a_restored_host_state_seeds_nothing_that_was_drawn_from(self) -> None:
        torch.manual_seed(3)
        first = draw()
        state = torch.get_rng_state()
        numbers = torch.rand(2)
        torch.set_rng_state(state)
        assert draw() != first
        assert torch.equal(torch.rand(2), numbers)

    def test_a_new_seed_from_the_system(self) -> None:
        torch.seed()
        first = draw()
        torch.seed()
        assert draw() != first

    def test_devices_draw_for_themselves(self) -> None:
        torch.manual_seed(3)
        first = draw()
        torch.manual_seed(3)
        torch.rand(4, device="xla:1")
        assert draw() == first

    def test_a_generator_of_the_host(self) -> None:
        generator = torch.Generator().manual_seed(3)
        first, second = draw(generator=generator), draw(generator=generator)
        assert first != second
        assert draw(generator=generator.manual_seed(3)) == first

    def test_a_generator_of_the_device(self) -> None:
        generator = torch.Generator(device="xla").manual_seed(3)
        assert generator.device.type == "xla" and generator.initial_seed() == 3
        first = draw(generator=generator)
        state = generator.get_state()
        second = draw(generator=generator)
        assert first != second
        generator.set_state(state)
        assert draw(generator=generator) == second
        assert draw(generator=generator.manual_seed(3)) == first

    def test_forked(self) -> None:
        torch.manual_seed(3)
        with torch.random.fork_rng(devices=[0], device_type="xla"):
            first = draw()
        assert draw() == first

    def test_dropout_differs_from_step_to_step_without_a_compile(
        self, compiles: Callable[..., AbstractContextManager[Any]]
    ) -> None:
        dropout, x = nn.Dropout(0.5), torch.ones(64, device="xla")
        dropout(x).tolist()
        with compiles(0):
            masks = [tuple(dropout(x).tolist()) for _ in range(4)]
        assert len(set(masks)) == 4
