"""Shapes are told without PyTorch's shape functions in Python, wherever ATen has its own or none is needed."""

import sys

import pytest
import torch
from agreement import refused_alike
from torch.nn import functional as F

PYTHON_SHAPES = ("torch/_refs/", "torch/_prims", "torch/_decomp/", "torch/_meta_registrations.py")

x, y = torch.randn(3, 7, 16), torch.randn(7, 16)
weight, scale, shift = torch.randn(5, 16), torch.randn(16), torch.randn(16)
CALLS = {
    "add": lambda d: d(x) + d(y),
    "scalar": lambda d: 2 * d(x) - 1,
    "relu": lambda d: torch.relu(d(x)),
    "where": lambda d: torch.where(d(x) > 0, d(x), d(y)),
    "masked_fill": lambda d: d(x).masked_fill(d(y) > 0, -1),
    "isnan": lambda d: d(x).isnan(),
    "gelu": lambda d: F.gelu(d(x)),
    "mean": lambda d: d(x).mean(1, keepdim=True),
    "cumsum": lambda d: d(x).cumsum(1),
    "cat": lambda d: torch.cat([d(x), d(x)], 1),
    "log_softmax": lambda d: F.log_softmax(d(x), -1),
    "nll": lambda d: F.nll_loss(d(y), torch.arange(7).to(d(y).device)),
    "linear": lambda d: F.linear(d(x), d(weight)),
    "layer_norm": lambda d: F.layer_norm(d(x), (16,), d(scale), d(shift)),
}


def shapes_in_python(function):
    results = []

    def see(frame, event, _argument):
        if event == "call" and any(part in frame.f_code.co_filename for part in PYTHON_SHAPES):
            results.append(frame.f_code.co_name)

    sys.setprofile(see)
    try:
        result = function()
    finally:
        sys.setprofile(None)
    return result, results


@pytest.mark.parametrize("name", CALLS)
def test_shape_without_python(name):
    expected = CALLS[name](lambda t: t)
    result, actual = shapes_in_python(lambda: CALLS[name](lambda t: t.to("xla")))
    assert actual == []
    assert (result.shape, result.dtype, result.stride()) == (expected.shape, expected.dtype, expected.stride())
    torch.testing.assert_close(result.cpu(), expected)


def test_gradient_of_layer_norm_without_python():
    tensors = [t.to("xla").requires_grad_() for t in (x[:2], scale, shift)]
    result = F.layer_norm(tensors[0], (16,), *tensors[1:])
    grads, actual = shapes_in_python(lambda: torch.autograd.grad(result, tensors, torch.ones_like(result)))
    assert actual == []
    assert [g.shape for g in grads] == [t.shape for t in tensors]


@pytest.mark.parametrize(
    "call",
    [
        lambda d: F.linear(d(x), d(torch.randn(5, 15))),
        lambda d: F.linear(d(x), d(weight), d(torch.randn(4))),
        lambda d: F.linear(d(x), d(weight.double())),
        lambda d: F.layer_norm(d(x), (7,)),
        lambda d: F.layer_norm(d(x), (16,), d(torch.randn(3))),
        lambda d: d(x) + d(torch.randn(6, 16)),
        lambda d: torch.where(d(x), d(x), d(x)),
    ],
)
def test_errors_are_those_of_the_cpu(call):
    refused_alike(lambda device: call(lambda t: t.to(device)))


@pytest.mark.parametrize(
    ("call", "dtypes"),
    [
        (lambda a, b: a + b, (torch.bfloat16, torch.int32)),
        (lambda a, b: torch.where(a > 0, a, b), (torch.float16, torch.float64)),
        (lambda a, b: a * b, (torch.bool, torch.uint8)),
        (lambda a, b: a.masked_fill(b > 0, 2), (torch.int64, torch.float32)),
        (lambda a, _b: F.relu(a), (torch.int8, torch.int8)),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_types_and_layouts_are_those_of_the_cpu(call, dtypes, turned):
    operands = [torch.arange(2 * 3 * 4).reshape(2, 3, 4).remainder(2).to(t) for t in dtypes]
    operands = [t.permute(2, 0, 1) if turned else t for t in operands]
    expected, result = call(*operands), call(*(t.to("xla") for t in operands))
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(result.cpu(), expected)
