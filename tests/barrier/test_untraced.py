"""What this package does inside a function under torch.compile is not compiled with it."""

from __future__ import annotations

import pytest
import torch

import torch_xla

# PyTorch's compiler looks for gradients itself.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


def test_a_barrier_and_a_read_in_a_compiled_function() -> None:
    model = torch.nn.Linear(4, 4)
    inputs = torch.randn(2, 4)
    model(inputs).square().mean().backward()
    want = model.weight.grad.clone()
    model.zero_grad()
    model.to("xla")

    @torch.compile(backend="openxla")
    def step(x: torch.Tensor) -> float:
        loss = model(x).square().mean()
        loss.backward()
        torch_xla.sync()
        return loss.item()

    step(inputs.to("xla"))
    torch.testing.assert_close(model.weight.grad.cpu(), want)


def test_a_backward_pass_whose_gradients_are_read_in_a_compiled_function() -> None:
    seen = []

    @torch.compile(backend="eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        y = (x * x).sum()
        y.backward()
        return y

    x = torch.arange(3.0, device="xla").requires_grad_()
    x.register_hook(lambda grad: seen.append((grad + 1).tolist()))
    step(x)
    assert seen == [[1.0, 3.0, 5.0]] and x.grad is not None and x.grad.tolist() == [0.0, 2.0, 4.0]
