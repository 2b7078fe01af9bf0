"""Backward operators that are asked for some of their results only, and what Meta kernels promise of the others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from agreement import on_both
from harness import lower
from torch import Tensor

import torch_xla

A = torch.ops.aten
MASKS = list(itertools.product([False, True], repeat=3))


def ones(*shape: int) -> Tensor:
    return torch.ones(shape)


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


X, S, IMAGES = numbers(5, 4), numbers(4).abs(), numbers(2, 4, 3, 3)
# By operator, its arguments before and after the mask. Those of attention are in test_attention.py.
CALLS = {
    A.native_batch_norm_backward.default: ((X, X + 1, S, S, S, S, S, True, 1e-5), ()),
    A.batch_norm_backward.default: ((X, X + 1, S, S, S, S, S, True, 1e-5), (torch.empty(0, dtype=torch.uint8),)),
    A.native_layer_norm_backward.default: ((X, X + 1, [4], ones(5, 1), ones(5, 1), S, S), ()),
    A.native_group_norm_backward.default: ((IMAGES, IMAGES + 1, ones(2, 2), ones(2, 2), S, 2, 4, 9, 2), ()),
    A.convolution_backward.default: (
        (numbers(2, 5, 3, 3), IMAGES, numbers(5, 4, 1, 1), [5], [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        (),
    ),
    A.grid_sampler_2d_backward.default: ((IMAGES, IMAGES + 1, numbers(2, 3, 3, 2), 0, 0, False), ()),
    A.grid_sampler_3d_backward.default: ((IMAGES[None], IMAGES[None] + 1, numbers(1, 4, 3, 3, 3), 0, 0, False), ()),
}
ELSEWHERE = {  # have no kernel for CPUs
    "aten::_fused_rms_norm_backward",
    "aten::linear_backward",
    "aten::_scaled_dot_product_fused_attention_overrideable_backward",
    "aten::_scaled_dot_product_efficient_attention_backward",
    "aten::convolution_backward_overrideable",
    "aten::matmul_backward",
    "aten::_sparse_mm_reduce_impl_backward",
}
MADE_OF_OTHERS = {"aten::_convolution_double_backward", "aten::_batch_norm_impl_index_backward"}
WITHOUT_META = {"aten::_slow_conv2d_backward"}


def test_every_operator_with_a_mask_is_here() -> None:
    results = set()
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::") or any(part in name for part in ("cudnn", "miopen", "mkldnn", "mps_")):
            continue
        schema = torch._C._get_schema(*name.split(".")) if "." in name else torch._C._get_schema(name, "")
        masks = [a for a in schema.arguments if str(a.type) == "List[bool]" and len(schema.returns) == a.N]
        if masks and not any(a.is_out for a in schema.arguments):
            results.add(schema.name)
    assert results == {str(op._schema.name) for op in CALLS} | ELSEWHERE | MADE_OF_OTHERS | WITHOUT_META


@pytest.mark.parametrize("op", CALLS, ids=str)
def test_only_what_is_asked_for(op: torch._ops.OpOverload) -> None:
    before, after = CALLS[op]
    pairs = []
    for mask in {m[: len(op._schema.returns)] for m in MASKS}:
        move = lambda x: x.to("xla") if isinstance(x, Tensor) else x  # noqa: E731
        ours = op(*map(move, before), list(mask), *map(move, after))
        theirs = op(*before, list(mask), *after)
        assert tuple(t is not None for t in ours) == mask
        pairs += [pair for pair in zip(ours, theirs, strict=True) if pair[0] is not None]
        rule = lower(op, *before, list(mask), *after)
        assert tuple(t is not None for t in rule) == mask
    torch_xla.sync()
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-4)


def test_a_mask_within_a_decomposition() -> None:
    op = A._batch_norm_impl_index_backward.default
    for mask in MASKS:
        args = (0, X, X + 1, S, S, S, S, S, True, 1e-5, list(mask), torch.empty(0, dtype=torch.uint8))
        ours, theirs = lower(op, *args), op(*args)
        for got, expected, asked in zip(ours, theirs, mask, strict=True):
            assert (got is not None) == asked
            if asked:
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, bias)


# Arguments that may need gradients, and their function.
FUNCTIONS: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]]]] = {
    "batch_norm_in_training": (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [(5, 4), (4,), (4,)]),
    "batch_norm_in_use": (
        lambda x, w, b: F.batch_norm(x, torch.zeros_like(w), torch.ones_like(w), w, b),
        [(5, 4), (4,), (4,)],
    ),
    "batch_norm_of_images": (lambda x, w: F.batch_norm(x, None, None, w, None, True), [(5, 4, 3, 2), (4,)]),
    "instance_norm": (lambda x, w, b: F.instance_norm(x, weight=w, bias=b), [(2, 4, 6), (4,), (4,)]),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), [(5, 4), (4,), (4,)]),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), [(3, 4, 5), (4,), (4,)]),
    "rms_norm": (lambda x, w: F.rms_norm(x, (4,), w), [(5, 4), (4,)]),
    "linear": (F.linear, [(5, 4), (3, 4), (3,)]),
    "conv1d": (F.conv1d, [(2, 4, 5), (3, 4, 2), (3,)]),
    "conv_transpose2d": (F.conv_transpose2d, [(2, 4, 5, 5), (4, 3, 2, 2), (3,)]),
    "bilinear": (F.bilinear, [(5, 3), (5, 4), (2, 3, 4), (2,)]),
    "grid_sample": (lambda x, g: F.grid_sample(x, g, align_corners=False), [(2, 3, 4, 4), (2, 5, 5, 2)]),
    "attention": (attention, [(1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4), (1, 1, 3, 3)]),
    "prelu": (F.prelu, [(5, 4), (4,)]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_of_some_arguments(name: str) -> None:
    function, shapes = FUNCTIONS[name]
    reference = [which for which in itertools.product([False, True], repeat=len(shapes)) if any(which)]

    def gradients(device: str) -> list[Tensor]:
        results = []
        for which in reference:
            given = [numbers(*shape).to(device).requires_grad_(on) for shape, on in zip(shapes, which, strict=True)]
            function(*given).square().sum().backward()
            assert all((x.grad is not None) == on for x, on in zip(given, which, strict=True))
            results += [x.grad for x in given if x.grad is not None]
        return results

    ours = gradients("xla")
    torch_xla.sync()
    for got, expected in zip(ours, gradients("cpu"), strict=True):
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-3, atol=1e-4)


@on_both(partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5, check_device=False))
def test_a_first_layer_of_batch_norm_is_trained(device: str) -> list[Tensor]:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(X.to(device)).square().mean().backward()
        optimizer.step()
        torch_xla.sync()
    return [*model.parameters(), *model.buffers()]


def test_what_is_not_asked_for_cannot_be_written() -> None:
    out = [torch.empty(0, device="xla") for _ in range(3)]
    before, _ = CALLS[A.native_layer_norm_backward.default]
    on_device = [x.to("xla") if isinstance(x, Tensor) else x for x in before]
    with pytest.raises(RuntimeError):
        A.native_layer_norm_backward.out(*on_device, [True, False, True], out0=out[0], out1=out[1], out2=out[2])
    assert (out[1].add(1).tolist(), (torch.ones(2, device="xla") + 1).tolist()) == ([], [2.0, 2.0])
