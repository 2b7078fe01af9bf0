"""Fifty operators with gradients, in place and as views, over meshes and specs: equal to one device, compiled once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import torch_xla
import torch_xla.distributed.spmd as xs

Operator = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Of two tensors of 8 x 8.
OPERATORS: dict[str, Operator] = {
    "add": lambda a, b: a + b,
    "mul by a row": lambda a, b: a * b[0],
    "div by a column": lambda a, b: a / (b[:, :1].abs() + 1),
    "exp": lambda a, b: a.exp() + b,
    "gelu": lambda a, b: F.gelu(a) * b,
    "where": lambda a, b: torch.where(a > b, a, b),
    "matmul": lambda a, b: a @ b,
    "linear": lambda a, b: F.linear(a, b, b[0]),
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b),
    "sum of rows": lambda a, b: a.sum(0) + b,
    "mean": lambda a, b: a.mean(1, keepdim=True) * b,
    "amax": lambda a, b: a.amax(1) + b.amin(0),
    "softmax": lambda a, b: a.softmax(-1) * b,
    "softmax of columns": lambda a, b: a.softmax(0) * b,
    "log_softmax": lambda a, b: a.log_softmax(-1) * b,
    "cumsum": lambda a, b: a.cumsum(0) + b.cumsum(1),
    "sort": lambda a, b: a.sort(0).values * b,
    "topk": lambda a, b: a.topk(3, -1).values.sum(-1) * b,
    "layer_norm": lambda a, b: F.layer_norm(a, (8,), b[0], b[1]),
    "var": lambda a, b: a.var(0) + b.std(1),
    "transpose": lambda a, b: a.t() * b,
    "reshape": lambda a, b: a.reshape(4, 16).repeat(1, 2) + b.reshape(2, 32).sum(0),
    "slice": lambda a, b: a[1:7:2, 3:] * b[:3, :5],
    "select": lambda a, b: a[3] + b[:, 2],
    "cat": lambda a, b: torch.cat([a, b], 0),
    "cat of columns": lambda a, b: torch.cat([a, b[:, :3]], 1),
    "stack": lambda a, b: torch.stack([a, b], 1),
    "pad": lambda a, b: F.pad(a, (1, 2, 3, 0)).sum(0)[:8] * b,
    "roll": lambda a, b: a.roll(3, 0) + b.flip(1),
    "expand": lambda a, b: a[:, None].expand(8, 5, 8).sum(1) * b,
    "gather": lambda a, b: a.gather(1, b.detach().argsort(1)),
    "index_select": lambda a, b: a[b.detach()[0].argsort()],
    "index_add": lambda a, b: a.index_add(0, b.detach()[:, 0].argsort() % 3, b),
    "embedding": lambda a, b: F.embedding(b.detach().argsort(1), a),
    "cross_entropy": lambda a, b: F.cross_entropy(a, b.detach().argmax(1), reduction="none"),
    "conv1d": lambda a, b: F.conv1d(a.view(2, 4, 8), b[:4, :4, None] * a.new_ones(3), padding=1),
    "conv1d with stride": lambda a, b: F.conv1d(a.view(2, 4, 8), b[:, :4, None] * a.new_ones(3), padding=2, stride=2),
    "conv2d": lambda a, b: F.conv2d(a.view(2, 4, 2, 4), b.view(4, 4, 2, 2), dilation=(1, 2)),
    "conv2d in groups": lambda a, b: F.conv2d(a.view(2, 4, 2, 4), b.view(8, 2, 2, 2), padding=1, groups=2),
    "depthwise conv1d": lambda a, b: F.conv1d(a[:, :, None] * a, b[:, None, :3], groups=8),
    "conv_transpose1d": lambda a, b: F.conv_transpose1d(a.view(2, 4, 8), b.view(4, 4, 4), stride=2),
    "pooling": lambda a, b: F.max_pool1d(a[None], 2) * F.avg_pool1d(b[None], 2),
    "attention": lambda a, b: F.scaled_dot_product_attention(a.view(2, 4, 8), b.view(2, 4, 8), a.view(2, 4, 8)),
    "add_": lambda a, b: a.clone().add_(b, alpha=2).mul_(3),
    "write to a row": lambda a, b: written(a, b, (2,)),
    "write to a block": lambda a, b: written(a, b, (slice(1, 7), slice(2, 5))),
    "write to a transpose": lambda a, b: transposed(a, b),
    "masked_fill": lambda a, b: a.masked_fill(b > 0, 2.0) * b,
    "tril": lambda a, b: a.tril() + b.triu(1),
    "norm": lambda a, b: a / a.norm() + b.pow(2).sum().sqrt(),
}


def written(a: torch.Tensor, b: torch.Tensor, where: Any) -> torch.Tensor:
    copy = a * 1
    copy[where] = b[where] * 2
    return copy


def transposed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    copy = a * 1
    copy.t()[1:3].add_(b[1:3])
    return copy


# Of images and kernels: their shapes, and splits over a mesh of three axes by which XLA counts copies twice.
CONVOLUTIONS: list[tuple[Operator, tuple[int, ...], tuple[int, ...], tuple[Any, Any]]] = [
    (lambda x, w: F.conv1d(x, w, padding=1), (8, 8, 16), (8, 8, 3), ((None, None, 1), (0, None, None))),
    (lambda x, w: F.conv2d(x, w, groups=8), (8, 8, 8, 8), (8, 1, 3, 3), ((0, None, None, None), (1, None, None, None))),
]

SPECS: list[tuple[Any, Any]] = [
    ((0, None), (0, None)),
    ((None, 0), (0, None)),
    ((0, None), (None, None)),
    ((0, -1), (-1, 0)),
    (((0, -1), None), (None, -1)),
    ((-1, None), (None, (-1, 0))),
]


def run(operator: Operator, given: Iterable[torch.Tensor], mesh: xs.Mesh | None = None, spec: Any = None) -> list[Any]:
    """What an operator gives for two tensors, and their gradients; recorded only where there is a mesh."""
    inputs = [t.clone().to("cpu" if mesh is None else "xla") for t in given]
    for t, own in zip(inputs, spec or (), strict=mesh is not None):
        xs.mark_sharding(t, mesh, own)
    inputs = [t.requires_grad_() for t in inputs]
    result = operator(*inputs)
    weights = torch.linspace(0.5, 1.5, result.numel()).reshape(result.shape).to(result.device)
    (result * weights).sum().backward()
    results = [result.detach(), *(t.grad for t in inputs)]
    # Whole, and not as views: to read one of those would be a program of its own.
    return [None if t is None else t.clone(memory_format=torch.contiguous_format) for t in results]


def check(names: list[str], shape: tuple[int, ...], spec: Any, compiles: Any) -> None:
    """All operators in one program, each with inputs of its own."""
    mesh = xs.Mesh(np.arange(8), shape)
    last = len(shape) - 1
    axes = [tuple(tuple(a % (last + 1) for a in e) if isinstance(e, tuple) else e for e in own) for own in spec]
    own = [tuple(last if entry == -1 else entry for entry in one) for one in axes]
    generator = torch.Generator().manual_seed(0)
    with compiles(1):
        for _ in range(2):
            given = torch.randn(len(names), 2, 8, 8, generator=generator)
            results = [run(OPERATORS[name], t, mesh, own) for name, t in zip(names, given, strict=True)]
            torch_xla.sync()
            for name, t, mine in zip(names, given, results, strict=True):
                for value, expected in zip(mine, run(OPERATORS[name], t), strict=True):
                    assert (value is None) == (expected is None), name
                    if value is not None:
                        text = f"{name} over {shape} as {own}: "
                        torch.testing.assert_close(value.cpu(), expected, rtol=1e-4, atol=1e-4, msg=text.__add__)


@pytest.mark.sweep
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("shape", [(8,), (4, 2), (2, 2, 2)], ids=str)
def test_all(shape: tuple[int, ...], spec: Any, compiles: Any) -> None:
    if len(shape) == 1 and "-1" in str(spec):
        pytest.skip("needs two axes")
    check(list(OPERATORS), shape, spec, compiles)


def test_sample(compiles: Any) -> None:
    check(["matmul", "sort", "write to a transpose", "index_add", "slice", "pad"], (4, 2), SPECS[3], compiles)


def test_convolutions(compiles: Any) -> None:
    mesh = xs.Mesh(np.arange(8), (2, 2, 2))
    generator = torch.Generator().manual_seed(0)
    for operator, image, kernel, spec in CONVOLUTIONS:
        given = [torch.randn(shape, generator=generator) for shape in (image, kernel)]
        with compiles(1):
            result = run(operator, given, mesh, spec)
            torch_xla.sync()
        for value, expected in zip(result, run(operator, given), strict=True):
            torch.testing.assert_close(value.cpu(), expected, rtol=1e-3, atol=1e-3)
