"""Operators one by one on CPU kernels, and a compiled program of them, agree."""

from __future__ import annotations

from collections.abc import Callable

import oracle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torch_xla


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def gradient(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


def convolution(device: str) -> tuple[Tensor, ...]:
    x, w = normal(2, 4, 9, 9).to(device).requires_grad_(), normal(6, 2, 3, 3).to(device).requires_grad_()
    y = F.conv2d(x, w, stride=2, padding=1, dilation=2, groups=2)
    return y.detach(), *gradient(y.square().sum(), x, w)


def transposed_convolution(device: str) -> tuple[Tensor, ...]:
    return (F.conv_transpose1d(normal(2, 4, 9).to(device), normal(4, 3, 5).to(device), stride=2, padding=1),)


def batch_norm(device: str) -> tuple[Tensor, ...]:
    norm = nn.BatchNorm2d(3).to(device)
    x = normal(4, 3, 5, 5).to(device).requires_grad_()
    y = norm(x)
    return y.detach(), norm.running_mean, norm.running_var, *gradient(y.exp().sum(), x)


def layer_norm(device: str) -> tuple[Tensor, ...]:
    x, w = normal(4, 6).to(device).requires_grad_(), normal(6).to(device).requires_grad_()
    y = F.layer_norm(x, (6,), w, None)
    return y.detach(), *gradient(y.sin().sum(), x, w)


def attention(device: str) -> tuple[Tensor, ...]:
    q, k, v = (normal(2, 3, 5, 4).to(device).mul(i).requires_grad_() for i in (1.0, 0.5, 2.0))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return y.detach(), *gradient(y.square().sum(), q, k, v)


def scatters(device: str) -> tuple[Tensor, ...]:
    x, index = normal(4, 6).to(device), torch.tensor([[0, 1, 1], [3, 2, 0]]).to(device)
    source = normal(2, 3).to(device)
    return (
        x.scatter(0, index, source),
        x.scatter_add(0, index, source),
        x.index_add(0, index[0], normal(3, 6).to(device)),
        x.index_put((index[1],), normal(3, 6).to(device), accumulate=True),
        x.scatter_reduce(0, index, source, "amax"),
    )


def embedding(device: str) -> tuple[Tensor, ...]:
    table, index = normal(7, 3).to(device).requires_grad_(), torch.tensor([1, 4, 4, 0]).to(device)
    y = F.embedding(index, table, padding_idx=0)
    return y.detach(), *gradient(y.square().sum(), table)


def pools(device: str) -> tuple[Tensor, ...]:
    x = normal(2, 3, 8, 8).to(device).requires_grad_()
    top, index = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    mean = F.avg_pool2d(x, 3, 2, 1, ceil_mode=True)
    return top.detach(), index, mean.detach(), *gradient((top.square().sum() + mean.square().sum()), x)


def losses(device: str) -> tuple[Tensor, ...]:
    x, y = normal(5, 4).to(device).requires_grad_(), torch.tensor([0, 3, -100, 1, 2]).to(device)
    loss = F.cross_entropy(x, y, label_smoothing=0.1)
    return loss.detach(), *gradient(loss, x)


def reductions(device: str) -> tuple[Tensor, ...]:
    x = normal(4, 5, 6).to(device)
    return x.var(1), x.logsumexp((0, 2)), x.cumsum(1), x.argmax(2), x.std(), x.norm(3.5, 1), x.median(1).values


def orders(device: str) -> tuple[Tensor, ...]:
    x = normal(4, 9).to(device)
    values, index = x.topk(3, 1)
    return values, index, x.sort(1, descending=True).values, x.argsort(0)


def views_and_writes(device: str) -> tuple[Tensor, ...]:
    x = normal(4, 6).to(device)
    x.t()[1:3].mul_(2.5)
    x[:, ::2] += x[:, 1::2]
    x.view(3, 8)[1].zero_()
    x[x > 1] = -1.0
    return x, x.unfold(1, 3, 2), x.flip(0).roll(1, 1)


def promotion(device: str) -> tuple[Tensor, ...]:
    i, b = torch.arange(6, device=device), torch.arange(6, device=device) > 2
    h = normal(6).to(device).bfloat16()
    return i * 2.5, i / 4, i // 4, b + i, h * 1.1 + i, (h > 0) * 3, i.to(torch.uint8) - 7, torch.where(b, h, 1.5)


def linear_algebra(device: str) -> tuple[Tensor, ...]:
    x = normal(4, 4).to(device)
    spd = x @ x.t() + 4 * torch.eye(4, device=device)
    factor, _ = torch.linalg.cholesky_ex(spd)
    solution, _ = torch.linalg.solve_ex(spd, x)
    inverse, _ = torch.linalg.inv_ex(spd)
    return factor, solution, inverse, torch.linalg.slogdet(spd).logabsdet, x.exp().matrix_power(3)


PROGRAMS = [
    convolution,
    transposed_convolution,
    batch_norm,
    layer_norm,
    attention,
    scatters,
    embedding,
    pools,
    losses,
    reductions,
    orders,
    views_and_writes,
    promotion,
    linear_algebra,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.compiled("the other way is what it is compared with")
def test_both_ways_of_running_agree(program: Callable[[str], tuple[Tensor, ...]]) -> None:
    torch_xla.sync()
    outputs = tuple(output.detach() for output in program("xla"))
    by_kernels = [oracle.value(output) for output in outputs]
    torch_xla.sync()
    for output, by_kernel, by_cpu in zip(outputs, by_kernels, program("cpu"), strict=True):
        torch.testing.assert_close(output.cpu(), by_kernel, rtol=2e-4, atol=2e-5)
        torch.testing.assert_close(by_kernel, by_cpu.detach().contiguous(), rtol=1e-4, atol=1e-5)


def test_inputs_are_not_written() -> None:
    x = torch.ones(3).to("xla")
    torch_xla.sync()
    leaf = x.detach().clone()
    torch_xla.sync()
    y = x * 2
    x.add_(2.5)
    assert oracle.value(x).tolist() == [3.5] * 3
    assert oracle.value(y).tolist() == [2.0] * 3
    assert (x.tolist(), y.tolist(), leaf.tolist()) == ([3.5] * 3, [2.0] * 3, [1.0] * 3)
