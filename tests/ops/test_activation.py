"""Activation functions, their derivatives, and the softmax family."""

from __future__ import annotations

import math

import pytest
import torch
from harness import check

A = torch.ops.aten
X = torch.tensor([-30.0, -6.0, -3.0, -1.0, -0.5, -0.0, 0.0, 0.5, 1.0, 3.0, 6.0, 30.0])
GRAD = torch.linspace(-1, 2, 12)
EDGES = torch.tensor([math.inf, -math.inf, math.nan])
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}

FORWARD = [
    (A.threshold.default, (0.5, -2), {}),
    (A.leaky_relu.default, (0.1,), {}),
    (A.hardtanh.default, (-1, 2.5), {}),
    (A.hardsigmoid.default, (), {}),
    (A.hardswish.default, (), {}),
    (A.hardshrink.default, (0.5,), {}),
    (A.softshrink.default, (0.5,), {}),
    (A.elu.default, (1.5, 1.1, 0.7), {}),
    (A.celu.default, (1.3,), {}),
    (A.softplus.default, (2, 5), {}),
    (A.silu.default, (), {}),
    (A.mish.default, (), {}),
    (A.gelu.default, (), {"approximate": "none"}),
    (A.gelu.default, (), {"approximate": "tanh"}),
]
BACKWARD = [
    (A.threshold_backward.default, (0.5,), {}),
    (A.leaky_relu_backward.default, (0.1, False), {}),
    (A.hardtanh_backward.default, (-1, 2.5), {}),
    (A.hardsigmoid_backward.default, (), {}),
    (A.hardswish_backward.default, (), {}),
    (A.hardshrink_backward.default, (0.5,), {}),
    (A.softshrink_backward.default, (0.5,), {}),
    (A.softplus_backward.default, (2, 5), {}),
    (A.silu_backward.default, (), {}),
    (A.mish_backward.default, (), {}),
    (A.gelu_backward.default, (), {"approximate": "none"}),
    (A.gelu_backward.default, (), {"approximate": "tanh"}),
    (A.tanh_backward.default, (), {}),
    (A.sigmoid_backward.default, (), {}),
]


def names(cases):
    return [f"{op}{kwargs or ''}" for op, _, kwargs in cases]


@pytest.mark.parametrize("op, args, kwargs", FORWARD, ids=names(FORWARD))
def test_forward(op, args, kwargs):
    check(op, X, *args, **kwargs, **TOLERANCE)
    check(op, X[3:10].bfloat16(), *args, **kwargs)
    check(op, torch.tensor(0.3), *args, **kwargs)
    check(op, torch.zeros(2, 0), *args, **kwargs)


@pytest.mark.parametrize("op, args, kwargs", BACKWARD, ids=names(BACKWARD))
def test_backward(op, args, kwargs):
    # Where tanh is near -1, one is added to it: the last bit of it is 4e-6 of the result.
    atol = 5e-6 if kwargs == {"approximate": "tanh"} else TOLERANCE["atol"]
    check(op, GRAD, X, *args, **kwargs, rtol=TOLERANCE["rtol"], atol=atol)
    check(op, GRAD.bfloat16(), X.bfloat16(), *args, **kwargs, rtol=0.02, atol=0.01)


@pytest.mark.parametrize("name", ["hardtanh", "hardswish", "leaky_relu", "softshrink", "silu", "elu"])
def test_edges(name):
    check(getattr(A, name).default, EDGES)


@pytest.mark.parametrize("is_result", [False, True])
def test_elu_backward(is_result):
    check(A.elu_backward.default, GRAD, 1.5, 1.1, 0.7, is_result, X.clamp(min=-1), **TOLERANCE)


def test_prelu():
    x, weight = torch.randn(2, 3, 4), torch.rand(1, 3, 1)
    check(A._prelu_kernel.default, x, weight)
    check(A._prelu_kernel_backward.default, torch.randn(2, 3, 4), x, weight.expand(2, 3, 4))


@pytest.mark.parametrize("training", [False, True])
def test_rrelu_backward(training):
    check(A.rrelu_with_noise_backward.default, GRAD, X, torch.rand(12), 0.1, 0.3, training, False)


def test_log_sigmoid():
    check(A.log_sigmoid_forward.default, X, **TOLERANCE)
    check(A.log_sigmoid_backward.default, GRAD, X, torch.exp(-X.abs()), **TOLERANCE)


@pytest.mark.parametrize("dim", [0, -1])
def test_glu(dim):
    x = torch.randn(4, 6)
    check(A.glu.default, x, dim)
    check(A.glu_backward.default, A.glu.default(x, dim) + 1, x, dim, **TOLERANCE)


@pytest.mark.parametrize("eps", [None, 0.1, 0.6])
def test_logit(eps):
    x = torch.tensor([0.0, 0.05, 0.5, 0.95, 1.0])
    check(A.logit.default, x, eps, **TOLERANCE)
    check(A.logit_backward.default, torch.ones(5), x, eps, **TOLERANCE)


def test_relu_of_integers():
    check(A.relu.default, torch.tensor([-2, 0, 3]))


SOFT = [torch.randn(3, 5), torch.randn(2, 3, 4) * 50, torch.tensor(2.0), torch.zeros(0, 3), torch.zeros(3, 0)]


@pytest.mark.parametrize("x", SOFT, ids=lambda x: str(list(x.shape)))
@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
@pytest.mark.parametrize("dim", [0, -1])
def test_softmax(name, x, dim):
    check(getattr(A, name).default, x, dim, False, **TOLERANCE)
    # PyTorch's kernel rounds differences of large logarithms to bfloat16 once more than the rule does.
    check(getattr(A, name).default, x.bfloat16(), dim, False, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", ["_softmax", "_log_softmax"])
def test_softmax_of_infinities(name):
    check(getattr(A, name).default, torch.tensor([[-math.inf, 1.0], [-math.inf, -math.inf], [math.inf, 1.0]]), 1, False)


def test_safe_softmax():
    check(A._safe_softmax.default, torch.tensor([[-math.inf, 1.0], [-math.inf, -math.inf]]), 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [0, 1])
def test_softmax_backward(dtype, dim):
    x, grad = torch.randn(4, 5), torch.randn(4, 5, dtype=dtype)
    tolerance = TOLERANCE if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    check(A._softmax_backward_data.default, grad, x.softmax(dim).to(dtype), dim, dtype, **tolerance)
    check(A._log_softmax_backward_data.default, grad, x.log_softmax(dim).to(dtype), dim, dtype, **tolerance)
