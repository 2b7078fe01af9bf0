"""A linear layer is one operator, and its backward pass another, whatever is done to them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from agreement import refused_alike
from functorch.compile import make_boxed_func
from probes import cut_of
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import torch_xla

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")

Shape = tuple[int, ...]
SHAPES: list[Shape] = [(5,), (3, 5), (2, 3, 5), (2, 1, 3, 5), (0, 5), (2, 0, 5)]


def examples(shape: Shape, bias: bool, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    tensors = [torch.randn(shape, dtype=dtype), torch.randn(4, 5, dtype=dtype), torch.randn(4, dtype=dtype)]
    return tensors[: 2 + bias]


def same(function: Callable[..., object], tensors: list[Tensor], **tolerance: float) -> None:
    """Compares with the CPU, strides included; by a compiled program, where small values would be computed there."""
    expected, got = (function(*(t.to(device, copy=True) for t in tensors)) for device in ("cpu", "xla"))
    torch_xla.sync()
    torch.testing.assert_close(got, expected, check_device=False, check_stride=True, **tolerance)


def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
    tensors = tuple(t.requires_grad_() for t in tensors)
    out = F.linear(*tensors)
    return out.detach(), *torch.autograd.grad(out.sin().abs().sum(), tensors)


def operators(tensor: Tensor) -> list[str]:
    return [node.op for node in cut_of(tensor).nodes]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape: Shape, bias: bool) -> None:
    same(gradients, examples(shape, bias))


@pytest.mark.parametrize("bias", [True, False])
def test_half_types_add_up_in_float32_and_round_once(bias: bool) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x = torch.full((2, 3, 4096), 0.25, dtype=dtype)
        weight, addend = torch.full((2, 4096), 0.5, dtype=dtype), torch.full((2,), 1 / 128, dtype=dtype)
        out = F.linear(x.to("xla"), weight.to("xla"), addend.to("xla") if bias else None)
        exact = torch.full((2, 3, 2), 512 + bias / 128)
        assert out.dtype == dtype and torch.equal(out.cpu(), exact.to(dtype))


def test_it_is_one_operator_and_its_backward_another() -> None:
    layer, x = nn.Linear(5, 4).to("xla"), torch.randn(2, 3, 5).to("xla").requires_grad_()
    out = layer(x)
    assert operators(out) == ["aten.linear.default"]
    out.backward(torch.ones(2, 3, 4).to("xla"))
    for grad in (x.grad, layer.weight.grad, layer.bias.grad):
        assert grad is not None and operators(grad) == ["aten.linear_backward.default"]
    with torch.inference_mode():
        assert operators(layer(x.detach())) == ["aten.linear.default"]


@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)], ids=str)
def test_gradients_of_some_inputs(frozen: tuple[int, ...]) -> None:
    def some(*tensors: Tensor) -> tuple[Tensor, ...]:
        expected = [t.requires_grad_() for i, t in enumerate(tensors) if i not in frozen]
        return torch.autograd.grad(F.linear(*tensors).square().sum(), expected)

    same(some, examples((2, 3, 5), bias=True))


@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)], ids=str)
def test_second_derivatives(shape: Shape) -> None:
    def double(*tensors: Tensor) -> tuple[Tensor, ...]:
        tensors = tuple(t.requires_grad_() for t in tensors)
        first = torch.autograd.grad(F.linear(*tensors).pow(3).sum(), tensors, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), tensors)

    same(double, examples(shape, bias=True))


@pytest.mark.parametrize("bias", [True, False])
def test_function_transforms(bias: bool) -> None:
    func = torch.func
    tensors = examples((3, 5), bias)
    places = tuple(range(len(tensors)))

    def loss(*tensors: Tensor) -> Tensor:
        return F.linear(*tensors).pow(3).sum()

    same(lambda *t: func.jvp(F.linear, t, t), tensors)
    same(lambda *t: func.vmap(F.linear, (0, *[None] * bias, None))(*t), tensors)
    same(lambda *t: func.vmap(func.grad(loss, places), (0, *[None] * bias, None))(*t), tensors)
    same(lambda *t: func.hessian(loss, places)(*t), tensors)
    same(lambda *t: func.jvp(func.grad(loss, places), t, t), tensors)
    same(lambda *t: func.functionalize(F.linear)(*t), tensors)


@pytest.mark.parametrize("bias", [False, True])
def test_batched_tangents_of_a_vector(bias: bool) -> None:
    """Without a bias PyTorch on CPU refuses them: it makes a matrix of the vector, and of the tangent keeps that."""
    x, *layer = examples((5,), bias)

    def jacobian(device: str, **how: object) -> Tensor:
        parts = [t.to(device) for t in layer]
        return torch.autograd.functional.jacobian(lambda x: F.linear(x, *parts).tanh(), x.to(device), **how).cpu()

    forward = jacobian("xla", strategy="forward-mode", vectorize=True)
    torch.testing.assert_close(forward, jacobian("cpu"))


def test_tangents_of_a_backward_pass() -> None:
    def forward_over_backward(*tensors: Tensor) -> tuple[Tensor, ...]:
        with torch.autograd.forward_ad.dual_level():
            duals = [torch.autograd.forward_ad.make_dual(t.requires_grad_(), torch.ones_like(t)) for t in tensors]
            grads = torch.autograd.grad(F.linear(*duals).pow(3).sum(), duals)
            return tuple(torch.autograd.forward_ad.unpack_dual(grad).tangent.detach() for grad in grads)

    def grad_takes_a_tangent(*tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = [t.requires_grad_() for t in tensors]
        out = F.linear(*inputs)
        with torch.autograd.forward_ad.dual_level():
            seed = torch.autograd.forward_ad.make_dual(torch.ones_like(out), torch.full_like(out, 2))
            grads = torch.autograd.grad(out, inputs, seed)
            return tuple(torch.autograd.forward_ad.unpack_dual(grad).tangent.detach() for grad in grads)

    same(forward_over_backward, examples((2, 3, 5), bias=True))
    same(grad_takes_a_tangent, examples((2, 3, 5), bias=True))


def test_shapes_that_are_no_layer() -> None:
    torch.manual_seed(0)
    vector, bias = torch.randn(5), torch.randn(())
    same(lambda x, w: F.linear(x, w), [torch.randn(3, 5), vector])
    same(lambda x, w, b: F.linear(x, w, b), [torch.randn(3, 5), torch.randn(4, 5), bias])
    same(lambda x, w, b: F.linear(x, w, b), [torch.randn(3, 5), torch.randn(4, 5), torch.randn(3, 4)])
    same(lambda x, w: torch.autograd.grad(F.linear(x, w.requires_grad_()).sum(), w), [torch.randn(3, 5), vector])
    same(lambda x, w: F.linear(x.mT, w[:, ::2]), [torch.randn(2, 3, 5), torch.randn(4, 6)])
    same(lambda x, w: F.linear(x, w), [torch.randint(9, (3, 5)), torch.randint(9, (4, 5))])
    same(lambda *t: F.linear(*t), examples((2, 5), True, torch.complex64), rtol=1e-5, atol=1e-5)
    same(lambda *t: gradients(*t)[1:], examples((2, 5), True, torch.complex128))


@pytest.mark.parametrize("shape", [(), (1,), (4,), (3, 4), (1, 4)], ids=str)
def test_biases_of_any_shape_without_autograd(shape: Shape) -> None:
    def layer(*tensors: Tensor) -> Tensor:
        with torch.inference_mode():
            return F.linear(*(t.clone() for t in tensors))

    same(layer, [torch.ones(3, 5), torch.ones(4, 5), torch.rand(shape)])


@pytest.mark.parametrize("grad", [True, False])
def test_errors_are_those_of_the_cpu(grad: bool) -> None:
    x, weight, bias = torch.randn(3, 5), torch.randn(4, 5), torch.randn(4)
    wrong = [
        (x[:, :3], weight, bias),
        (x[None, :, :3], weight),
        (x, weight, bias[:3]),
        (x[None], weight, bias[:3]),
        (x, weight.double(), bias),
        (x[None], weight.double()),
        (x, weight, bias.double()),
        (x.sum(), weight),
        (x, weight.sum()),
        (x, weight[None]),
    ]
    with torch.set_grad_enabled(grad):
        for tensors in wrong:
            refused_alike(lambda d, given=tensors: F.linear(*(t.to(d, copy=True).requires_grad_(grad) for t in given)))
        with pytest.raises(RuntimeError, match="same device"):
            F.linear(x.to("xla"), weight.requires_grad_(grad))


def test_a_dispatch_mode_sees_the_parts() -> None:
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(function))
            return function(*args, **kwargs or {})

    x, weight, bias = (t.to("xla") for t in examples((3, 5), bias=True))
    with Watch():
        F.linear(x, weight, bias)
    assert seen == ["aten.t.default", "aten.addmm.default"]
    same(lambda *t: torch.compile(F.linear, backend="aot_eager", fullgraph=True)(*t), examples((2, 3, 5), bias=True))


@pytest.mark.costs("PyTorch's compiler traces functions")
def test_a_traced_graph_has_it_whole() -> None:
    """Unless a subclass or a transform sees the call as well."""
    graphs: list[list[str]] = []

    def note(module: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append([str(n.target) for n in module.graph.nodes if "linear" in str(n.target) or "mm" in str(n.target)])
        return make_boxed_func(module)

    compiled = functools.partial(torch.compile, backend=aot_autograd(fw_compiler=note), fullgraph=True)
    tensors = examples((2, 3, 5), bias=True)
    same(lambda *t: torch.autograd.grad(compiled(F.linear)(*(x.requires_grad_() for x in t)).sum(), t), tensors)
    assert graphs[-2:] == [["aten.linear.default"], ["aten.linear_backward.default"]]
    same(compiled(lambda x, *layer: F.linear(TwoTensor(x, -x), *layer).a), examples((2, 3, 5), bias=True))
    assert set(graphs[-1]) == {"aten.mm.default"}
    per_row = torch.func.vmap(torch.func.grad(lambda x, *layer: F.linear(x, *layer).sum()), (0, None, None))
    same(compiled(per_row), examples((3, 5), bias=True))
    assert not any("linear" in name for name in graphs[-1])


def test_autocast_and_checkpointing() -> None:
    layer = nn.Linear(5, 4).to("xla")
    x = torch.randn(3, 5).to("xla")
    with torch.autocast("xla", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    plain = layer.weight.grad.cpu()
    assert layer.weight.grad.dtype == torch.float32
    layer.zero_grad()
    with torch.autocast("xla", torch.bfloat16):
        again = checkpoint(layer, x, use_reentrant=False)
    again.float().sum().backward()
    torch.testing.assert_close(layer.weight.grad.cpu(), plain)
