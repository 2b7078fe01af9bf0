"""Every optimizer of `torch.optim`: the numbers of the CPU, and one graph for the loop."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn, optim

import torch_xla
import torch_xla.debug.metrics as met

# `test_counts` pins plain SGD, Adam, AdamW, RMSprop and Adagrad. More than one graph:
READS = 2  # the step reads a norm with .item(), which runs what it needs first
GROWS = 2  # Python leaves the adaptive part out until the sixth step

READING = pytest.mark.compiled(
    "it reads a number in each step, whose graphs of their own are not pinned here", reads=False
)

CASES: list[Any] = [
    (optim.Adadelta, {}, 1),
    (optim.Adadelta, {"foreach": False, "maximize": True}, 1),
    pytest.param(optim.Adafactor, {}, READS, marks=READING),
    (optim.Adagrad, {"fused": True}, 1),
    (optim.Adam, {"foreach": False}, 1),
    (optim.Adam, {"capturable": True}, 1),
    (optim.Adadelta, {"capturable": True}, 1),
    (optim.Adam, {"fused": True, "amsgrad": True}, 1),
    (optim.AdamW, {"fused": True}, 1),
    (optim.Adamax, {}, 1),
    (optim.Adamax, {"foreach": False}, 1),
    pytest.param(optim.ASGD, {}, 1, marks=READING),
    pytest.param(optim.ASGD, {"foreach": False}, 1, marks=READING),
    (optim.ASGD, {"capturable": True}, 1),
    pytest.param(optim.LBFGS, {"max_iter": 3, "history_size": 3}, 1, marks=READING),
    (optim.Muon, {}, 1),
    (optim.NAdam, {}, 1),
    (optim.NAdam, {"foreach": False}, 1),
    (optim.RAdam, {}, 1),
    (optim.RAdam, {"capturable": True}, 1),
    (optim.RAdam, {"foreach": False}, GROWS),
    (optim.RMSprop, {"foreach": False, "centered": True, "momentum": 0.5}, 1),
    (optim.Rprop, {}, 1),
    (optim.Rprop, {"foreach": False}, 1),
    (optim.SGD, {"foreach": False, "momentum": 0.9}, 1),
    (optim.SGD, {"fused": True, "momentum": 0.9, "nesterov": True}, 1),
]

Compiles = Callable[..., AbstractContextManager[Any]]


def train(device: str, kind: type[optim.Optimizer], options: dict[str, Any], steps: int = 10) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(4, 3, bias=kind is not optim.Muon).to(device)
    x = torch.randn(5, 4).to(device)
    if device == "cpu":  # has no use for it, and refuses it
        options = {name: value for name, value in options.items() if name != "capturable"}
    optimizer = kind(model.parameters(), lr=0.05, **options)  # type: ignore[call-arg]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(steps):
        if kind is optim.LBFGS:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
        torch_xla.sync()
    return model


@pytest.mark.parametrize(("kind", "options", "graphs"), CASES)
def test_numbers_and_graphs(
    kind: type[optim.Optimizer], options: dict[str, Any], graphs: int, compiles: Compiles
) -> None:
    with compiles() as compiled:
        ours = train("xla", kind, options)
    assert compiled.value <= graphs  # fewer where another case has the same graph
    theirs = train("cpu", kind, options)
    for mine, expected in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_parameters_are_taken_by_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python calls a few operators for all of them, not some for each."""
    from torch.overrides import TorchFunctionMode

    class Calls(TorchFunctionMode):
        names: list[str] = []

        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(function.__name__)
            return function(*args, **(kwargs or {}))

    params = [nn.Parameter(torch.ones(3, device="xla")) for _ in range(20)]
    for param in params:
        param.grad = torch.ones(3, device="xla")
    optimizer = optim.AdamW(params)
    optimizer.step()
    with Calls() as calls:
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        optimizer.step()
    assert {"_foreach_norm", "_foreach_lerp_", "_foreach_addcdiv_"} <= set(calls.names)
    assert not {"mul_", "lerp_", "addcmul_", "addcdiv_"} & set(calls.names)


def test_clipping_reads_nothing(counted: Compiles, compiles: Compiles) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to("xla")
    x = torch.randn(3, 4).to("xla")
    torch_xla.sync()

    def reads() -> int:
        data = met.metric_data("TransferFromDeviceTime")
        return data[0] if data else 0

    before = reads()
    norms = []
    with compiles(1), counted("HostCompute", 0):
        for _ in range(3):
            model.zero_grad()
            model(x).square().sum().backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            nn.utils.clip_grad_value_(model.parameters(), 0.2)
            torch_xla.sync()
    assert reads() == before
    assert norms[0].item() == pytest.approx(norms[2].item()) and norms[0].item() > 0.5
