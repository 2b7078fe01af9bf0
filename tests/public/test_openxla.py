"""Programs of `torch.compile(backend="openxla")`: how many a step runs, and that its values are those of the CPU."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from agreement import closely, on_both
from conftest import Counting
from probes import sampled
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import torch_xla
from torch_xla._core.functions.calls import calls_of

near = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5, check_device=False)
runs = functools.partial(sampled, "ExecuteTime")  # programs that are run in the block


def network(width: int, device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 1)).to(device)
    return model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def batches(width: int, count: int = 6) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, width) for _ in range(count)]


Step = Callable[[Callable[..., torch.Tensor], torch.optim.Optimizer, torch.Tensor, int], Any]


def plain(net: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, x: torch.Tensor, _: int) -> None:
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()


def zeroed(net: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, x: torch.Tensor, _: int) -> None:
    net(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def accumulating(
    net: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, x: torch.Tensor, turn: int
) -> None:
    net(x).square().mean().backward()
    if turn % 2:
        optimizer.step()
        optimizer.zero_grad()


def twice(net: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, x: torch.Tensor, _: int) -> None:
    optimizer.zero_grad()
    (net(x) - net(x * 2)).square().mean().backward()
    optimizer.step()


def compare(step: Step, width: int, expected: int, barrier: bool) -> None:
    """Trains on the CPU and, compiled, on the device: runs of a step in the steady state, and final values."""

    @on_both(near)
    def trained(device: str) -> list[torch.Tensor]:
        model, optimizer = network(width, device)
        net = torch.compile(model, backend="openxla") if device == "xla" else model
        data = [x.to(device) for x in batches(width)]
        torch_xla.sync()
        for turn, x in enumerate(data):
            with runs(expected if device == "xla" and turn >= 3 else None):
                step(net, optimizer, x, turn)
                if barrier:
                    torch_xla.sync()
        return list(model.state_dict().values())

    trained()


@pytest.mark.compiled("it counts runs of programs")
@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("step", [plain, zeroed, accumulating, twice])
def test_a_training_step_is_one_program(step: Step, barrier: bool) -> None:
    compare(step, 11, 1, barrier)


@pytest.mark.filterwarnings("ignore")  # of Dynamo's own while it traces
@pytest.mark.costs("PyTorch's compiler traces an optimizer")
def test_a_graph_break_does_not_end_it() -> None:
    @torch.compiler.disable
    def outside(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def step(net: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, x: torch.Tensor, _: int) -> None:
        optimizer.zero_grad()
        loss = torch.compile(lambda x: net(outside(net(x) * x).square()).mean(), backend="openxla")(x)
        loss.backward()
        optimizer.step()

    compare(step, 12, 1, False)


@pytest.mark.compiled("it counts runs of programs")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.costs("PyTorch's compiler traces an optimizer")
def test_a_compiled_update_belongs_to_it() -> None:
    def step(net: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer, x: torch.Tensor, _: int) -> None:
        @torch.compile(backend="openxla")
        def whole() -> None:
            plain(net, optimizer, x, 0)

        whole()

    compare(step, 13, 1, False)


@pytest.mark.costs("PyTorch's compiler traces a network")
def test_a_step_records_what_one_without_a_compiler_does() -> None:
    """Linear layers and their backward passes stay whole, also in the first call, which PyTorch watches."""
    steps = []
    for compiled in (False, True):
        model = nn.Sequential(nn.Linear(9, 9), nn.LayerNorm(9), nn.GELU(), nn.Linear(9, 2)).to("xla")
        net = torch.compile(model, backend="openxla") if compiled else model
        for x in batches(9, count=2):
            before = Counter(torch_xla._bindings.op_counts())
            torch.autograd.grad(net(x.to("xla")).sum(), list(model.parameters()))
            steps.append(Counter(torch_xla._bindings.op_counts()) - before)
    assert steps[0]["linear"] == steps[0]["linear_backward"] == 2
    assert all(step == steps[0] for step in steps)


@on_both(near)
def test_its_values_are_there_before_the_next(device: str) -> tuple[torch.Tensor, ...]:
    model, optimizer = network(14, device)
    net = torch.compile(model, backend="openxla") if device == "xla" else model
    x = batches(14)[0].to(device)
    for _ in range(2):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
    return loss.detach(), *(p.grad for p in model.parameters())


def test_without_gradients_a_call_is_started_at_once(compiles: Counting) -> None:
    model, _ = network(15, "xla")
    net = torch.compile(model.eval(), backend="openxla")
    x = batches(15)[0].to("xla")
    with torch.no_grad():
        net(x)
        for _ in range(3):
            with runs(1), compiles(0):
                y = net(x)
                assert not torch_xla._bindings.has_pending(0)
        with runs(1), compiles(0):
            net(batches(15)[1].to("xla"))  # what waits on the host needs no program of its own
        for expected in (None, 0):
            with runs(2), compiles(expected):
                net(x * 2)  # what is recorded does: else a call's program would depend on it
    torch.testing.assert_close(y.cpu(), model.to("cpu")(x.cpu()), rtol=1e-4, atol=1e-5)


def test_evaluation_between_steps(compiles: Counting) -> None:
    model, optimizer = network(16, "xla")
    net = torch.compile(model, backend="openxla")
    x = batches(16)[0].to("xla")
    for turn in range(4):
        with compiles(None if turn < 2 else 0):
            for _ in range(2):
                plain(net, optimizer, x, turn)
            with torch.no_grad():
                model.eval()
                assert net(x).isfinite().all()
                model.train()


@pytest.mark.parametrize("dynamic", [False, True])
@on_both(near)
def test_no_call_of_a_graph_goes_through_python(
    dynamic: bool, monkeypatch: pytest.MonkeyPatch, device: str
) -> list[torch.Tensor]:
    graphs: list[bool] = []

    def noted(module: torch.fx.GraphModule) -> Callable[..., Any]:
        run = calls_of(module)
        graphs.append(run is not module)
        return run

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = x.shape[0]
        parts = (x @ weight).view(rows * 2, -1).split(2, 1)
        return torch.cat([part.sin() * rows for part in parts]).sum(0)

    monkeypatch.setattr("torch_xla.core.dynamo_bridge.calls_of", noted)
    run = torch.compile(function, backend="openxla", dynamic=dynamic) if device == "xla" else function
    results = []
    for rows in (4, 6) if dynamic else (4,):
        x, weight = (torch.randn(*shape).to(device).requires_grad_() for shape in ((rows, 5), (5, 8)))
        result = run(x, weight)
        results += [result.detach(), *torch.autograd.grad(result.sum(), (x, weight))]
    assert graphs == [True, True] * (device == "xla")
    return results


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("options", [{}, {"backend": "inductor"}])
@on_both(closely)
def test_what_is_compiled_without_a_backend_is_compiled_by_openxla(
    options: dict[str, Any], device: str
) -> tuple[torch.Tensor, ...]:
    def step(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.mul_(0.5).add_(x)
        return (state * 2).sin().sum()

    x, state = torch.arange(3.0).to(device).requires_grad_(), torch.ones(3).to(device)
    loss = (torch.compile(step, **options) if device == "xla" else step)(x, state)
    loss.backward()
    return loss, state, x.grad


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_flex_attention(compiled: bool) -> None:
    run = torch.compile(flex_attention) if compiled else flex_attention
    mask = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 16, 16, device="xla")
    q, k, v = (torch.randn(1, 2, 16, 8, device="xla", requires_grad=True) for _ in range(3))
    result = run(q, k, v, block_mask=mask, score_mod=lambda score, b, h, i, j: score - (i - j))
    distance = (torch.arange(16)[:, None] - torch.arange(16)).float()
    bias = (-distance).masked_fill(distance < 0, -torch.inf)
    mine = [x.detach().cpu().requires_grad_() for x in (q, k, v)]
    expected = nn.functional.scaled_dot_product_attention(*mine, attn_mask=bias)
    near(result, expected)
    weight = torch.randn(1, 2, 16, 8)
    near(torch.autograd.grad(result, [q, k, v], weight.to("xla")), torch.autograd.grad(expected, mine, weight))
