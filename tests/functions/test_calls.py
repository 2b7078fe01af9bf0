"""Traced graphs whose calls are made without Python between them: same values, same graphs, same errors."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from torch_xla import _bindings
from torch_xla._core.execute import export
from torch_xla._core.functions.calls import calls_of

X = torch.randn(4, 6)


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("the module itself was called")


def traced(function: Callable[..., Any], *args: Any, mode: Any = "real") -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode=mode)(*args)


def check(function: Callable[..., Any], *args: Tensor, mode: str = "real", traced_with: tuple[Any, ...] = ()) -> None:
    """Compares with the CPU, and sees that only the recorder makes the calls."""
    module = traced(function, *(traced_with or args), mode=mode)
    run = calls_of(module)
    assert run is not module
    setattr(type(module), "__call__", refuse)  # noqa: B010 (each module has a class of its own)
    moved = [x.to("xla") for x in args]
    result, expected = run(*moved), function(*args)
    assert type(result) is type(expected)
    for ours, theirs in zip(result, expected, strict=True):
        if isinstance(theirs, Tensor):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)
        else:
            assert ours == theirs and type(ours) is type(theirs)
    torch.testing.assert_close(moved, list(args), rtol=1e-4, atol=1e-5, check_device=False)  # what it wrote to them


GRAPHS: dict[str, Callable[..., Any]] = {
    "numbers": lambda x: (x + 2, x * 0.5, 1 - x, x.clamp(min=0), torch.add(x, x, alpha=3)),
    "lists": lambda x: (torch.cat([x, x.relu(), x], 1), torch.stack((x, -x)), x.view(2, 2, 6), x.sum([0, 1])),
    "several results": lambda x: (*torch.sort(x, dim=1), torch.native_layer_norm(x, [6], None, None, 1e-5)[0]),
    "elements": lambda x: (x.split(2, 1)[2], x.unbind()[1], *x.tensor_split(2, 1)),
    "indices": lambda x: (x[:, [1, 3]], x[torch.tensor([2, 0])], torch.ops.aten.index(x, [None, x[0].long() * 0])),
    "keywords": lambda x: (x.sum(1, dtype=torch.float64), x.to(torch.bfloat16).float(), torch.zeros_like(x)),
    "unused": lambda x: [x.exp()],
}


@pytest.mark.parametrize("name", GRAPHS)
def test_values(name: str) -> None:
    check(GRAPHS[name], X.clone())


def test_writes() -> None:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        view = x[1:]
        view.mul_(2)
        y.copy_(x.sum(0))
        return x + y, view.neg_()

    check(function, X.clone(), torch.zeros(6))


def test_nothing_where_a_graph_returns_none() -> None:
    module = traced(lambda x: (x + 1, x * 2), X)
    (output,) = (node for node in module.graph.nodes if node.op == "output")
    output.args = ((output.args[0][0], None),)
    module.recompile()
    first, second = calls_of(module)(X.to("xla"))
    assert second is None and torch.equal(first.cpu(), X + 1)


def test_open_sizes() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        n = x.shape[0]
        return x.reshape(n * 2, 3), x.new_ones(n + 1, 2), x.expand(2, n, 6), x * n, x / (n / 2)

    for rows in (5, 7):
        check(function, torch.randn(rows, 6), mode="symbolic", traced_with=(X,))


def test_values_are_let_go_of() -> None:
    run = calls_of(traced(lambda x: (x.exp().sin().sum(),), X))
    x = X.to("xla")
    before = len(_bindings.live_tensors(0))
    result = run(x)
    assert len(_bindings.live_tensors(0)) == before + len(result)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_derivatives_of_its_calls() -> None:
    run, x, one = calls_of(traced(lambda x: [x.sin()], X)), X.to("xla"), torch.ones_like(X).to("xla")
    with torch.no_grad():
        assert not run(x.clone().requires_grad_())[0].requires_grad
        derivatives = [torch.func.jvp(lambda x: run(x)[0], (x,), (one,))[1]]
        with torch.autograd.forward_ad.dual_level():
            (dual,) = run(torch.autograd.forward_ad.make_dual(x, one))
            derivatives.append(torch.autograd.forward_ad.unpack_dual(dual).tangent)
    derivatives += torch.autograd.grad(run(x.requires_grad_())[0], x, one)
    for derivative in derivatives:
        torch.testing.assert_close(derivative.cpu(), X.cos())


def test_the_graph_is_that_of_python() -> None:
    module = traced(lambda x: (torch.cat([x.t() + 1, x.t()]).softmax(0),), X)
    x = X.to("xla")
    texts = [export.graph_text([run(x)[0]], "text") for run in (module, calls_of(module))]
    assert texts[0] == texts[1]


def test_errors_are_those_of_python() -> None:
    module = traced(lambda x, i: (x.index_select(0, i),), X, torch.tensor([1]))
    for broken, kind in ((torch.zeros(1, 1, dtype=torch.long), IndexError), (torch.zeros(1), RuntimeError)):
        texts = []
        for run in (module, calls_of(module)):
            with pytest.raises(kind) as raised:
                run(X.to("xla"), broken.to("xla"))
            texts.append(str(raised.value))
        assert texts[0] == texts[1]


def test_a_mode_sees_each_call() -> None:
    class Names(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    run = calls_of(traced(lambda x: (x.exp().sin(),), X))
    with Names() as names:
        run(X.to("xla"))
    assert "aten.sin.default" in names.seen


@pytest.mark.parametrize("function", [operator.add, operator.getitem])  # Python's, of tensors
def test_other_graphs_stay_modules(function: Callable[..., Any]) -> None:
    inner = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(6, 2)))
    assert calls_of(inner) is inner
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(function, (x, 1)),))
    module = torch.fx.GraphModule({}, graph)
    assert calls_of(module) is module


def test_a_call_of_python_within_has_its_own_line() -> None:
    @torch.library.custom_op("torch_xla_tests::calls_inner", mutates_args=())
    def inner(x: Tensor) -> Tensor:
        return x * 3 + 1  # the line of its own

    inner.register_fake(torch.empty_like)
    run = calls_of(traced(lambda x: (torch.ops.torch_xla_tests.calls_inner(x.exp()).sin(),), X))
    x = X.to("xla")
    (result,) = run(x)  # the line of the call
    described = export.graph_text([result], "text")
    lines = {part for part in described.split() if part.startswith("test_calls.py") or "test_calls.py:" in part}
    assert len(lines) == 2, described
    torch.testing.assert_close(result.cpu(), (X.exp() * 3 + 1).sin(), rtol=1e-4, atol=1e-5)
