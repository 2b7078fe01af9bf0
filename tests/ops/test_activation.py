"""Activation functions, their derivatives, and the softmax family."""

from __future__ import annotations

import math

import torch
from harness import values

A = torch.ops.aten
X = torch.tensor([-30.0, -6.0, -3.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 3.0, 6.0, 30.0])
GRAD = torch.linspace(-1, 2, 12)
EDGES = torch.tensor([math.inf, -math.inf, math.nan])
# By name: the arguments of the function, and those of its derivative where they are others.
FUNCTIONS = {
    "threshold": [((0.5, -2), (0.5,))],
    "leaky_relu": [((0.1,), (0.1, False))],
    "hardtanh": [((-1, 2.5),)],
    "hardsigmoid": [((),)],
    "hardswish": [((),)],
    "hardshrink": [((0.5,),)],
    "softshrink": [((0.5,),)],
    "elu": [((1.5, 1.1, 0.7), None)],
    "celu": [((1.3,), None)],
    "softplus": [((2, 5),)],
    "silu": [((),)],
    "mish": [((),)],
    "gelu": [({"approximate": "none"},), ({"approximate": "tanh"},)],
    "tanh": [(None, ())],
    "sigmoid": [(None, ())],
}


@values
def test_functions():
    for name, forms in FUNCTIONS.items():
        for form in forms:
            forward, backward = form[0], form[-1]
            if forward is not None:
                args, kwargs = ((), forward) if isinstance(forward, dict) else (forward, {})
                for x in (X, X[3:10].bfloat16(), torch.tensor(0.3), torch.zeros(2, 0)):
                    yield getattr(A, name).default, x, *args, kwargs
            if backward is not None:
                args, kwargs = ((), backward) if isinstance(backward, dict) else (backward, {})
                for grad, x in ((GRAD, X), (GRAD.bfloat16(), X.bfloat16())):
                    yield getattr(A, f"{name}_backward").default, grad, x, *args, kwargs
    for name in ("hardtanh", "hardswish", "leaky_relu", "softshrink", "silu", "elu"):
        yield getattr(A, name).default, EDGES
    for is_result in (False, True):
        yield A.elu_backward.default, GRAD, 1.5, 1.1, 0.7, is_result, X.clamp(min=-1)
    x, weight = torch.randn(2, 3, 4), torch.rand(1, 3, 1)
    yield A._prelu_kernel.default, x, weight
    yield A._prelu_kernel_backward.default, torch.randn(2, 3, 4), x, weight.expand(2, 3, 4)
    for training in (False, True):
        yield A.rrelu_with_noise_backward.default, GRAD, X, torch.rand(12), 0.1, 0.3, training, False
    yield A.log_sigmoid_forward.default, X
    yield A.log_sigmoid_backward.default, GRAD, X, torch.exp(-X.abs())
    for dim in (0, -1):
        x = torch.randn(4, 6)
        yield A.glu.default, x, dim
        yield A.glu_backward.default, A.glu.default(x, dim) + 1, x, dim
    x = torch.tensor([0.0, 0.05, 0.5, 0.95, 1.0])
    for eps in (None, 0.1, 0.6):
        yield A.logit.default, x, eps
        yield A.logit_backward.default, torch.ones(5), x, eps
    yield A.relu.default, torch.tensor([-2, 0, 3])


@values
def test_softmax():
    soft = [torch.randn(3, 5), torch.randn(2, 3, 4) * 50, torch.tensor(2.0), torch.zeros(0, 3), torch.zeros(3, 0)]
    infinities = torch.tensor([[-math.inf, 1.0], [-math.inf, -math.inf], [math.inf, 1.0]])
    for op in (A._softmax.default, A._log_softmax.default):
        for x in soft:
            for dim in (0, -1):
                yield op, x, dim, False
                yield op, x.bfloat16(), dim, False
        yield op, infinities, 1, False
    yield A._safe_softmax.default, infinities[:2], 1
    for dtype in (torch.float32, torch.bfloat16):
        for dim in (0, 1):
            x, grad = torch.randn(4, 5), torch.randn(4, 5, dtype=dtype)
            yield A._softmax_backward_data.default, grad, x.softmax(dim).to(dtype), dim, dtype
            yield A._log_softmax_backward_data.default, grad, x.log_softmax(dim).to(dtype), dim, dtype
