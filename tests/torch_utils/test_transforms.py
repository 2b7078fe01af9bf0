"""`torch.func`, forward-mode AD and `torch.compile` on xla: the numbers of the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from agreement import as_on_cpu, numbers
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, stack_module_state, vjp, vmap

import torch_xla  # noqa: F401

pytestmark = [
    # PyTorch scripts its decompositions for forward mode at their first use, and `linearize` folds constants.
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning"),
]


@as_on_cpu
def test_derivatives_of_functions(device: str) -> Any:
    x, ones = numbers(device), torch.ones(4).to(device)
    value, pull = vjp(lambda t: (t.sin(), t.sum()), x)
    line, push = linearize(lambda t: t.sin() * 2, x)
    return (
        jvp(lambda t: (t**2).sin() * t.sum(), (x,), (ones,)),
        jacfwd(lambda t: t.cumsum(0) ** 2)(x),
        jacrev(lambda t: t.cumsum(0) ** 2)(x),
        hessian(lambda t: (t**3).sum() * t.prod())(x),
        value,
        pull((ones, ones.sum())),
        line,
        push(ones),
    )


@as_on_cpu
def test_gradients_per_sample_and_ensembles(device: str) -> Any:
    conv = nn.Conv1d(1, 2, 3).to(device)
    samples = torch.arange(24.0).reshape(3, 1, 8).to(device)

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(conv, weights, (x.unsqueeze(0),)).square().sum()

    models = [nn.Linear(4, 2).to(device) for _ in range(3)]
    parameters, buffers = stack_module_state(models)
    together = vmap(lambda p, b, x: functional_call(models[0], (p, b), (x,)), in_dims=(0, 0, None))
    each = vmap(grad(loss), in_dims=(None, 0))(dict(conv.named_parameters()), samples)
    return each, together(parameters, buffers, numbers(device))


@as_on_cpu
def test_forward_mode_through_a_module(device: str) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU()).to(device)
    with forward_ad.dual_level():
        x = forward_ad.make_dual(numbers(device), torch.ones(4).to(device))
        return forward_ad.unpack_dual(model(x))[:2]


@as_on_cpu
def test_writes_under_transforms(device: str) -> Any:
    def write(t: Tensor) -> Tensor:
        y = t.clone()
        y.view(2, 2)[0].mul_(2)
        y[3] = t[0]
        return y

    x = torch.stack([numbers(device), numbers(device) + 1])
    return vmap(write)(x), jacrev(write)(x[0]), torch.func.functionalize(write)(x[0])


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@as_on_cpu
def test_dynamo(device: str, backend: str) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)).to(device)
    out = torch.compile(model, backend=backend)(numbers(device))
    out.sum().backward()
    return out, [p.grad for p in model.parameters()]
