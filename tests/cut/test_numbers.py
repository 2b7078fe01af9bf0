"""Which numbers are inputs of a program: two graphs at most for a number of an operator that loops change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import Counting
from probes import python

import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla import _bindings
from torch_xla._core.compile import cache

Step = Callable[[torch.Tensor, Any], Any]

VARYING: dict[str, tuple[Step, Sequence[Any]]] = {
    "roll": (lambda x, i: x.roll(i, 1), (1, 2, 3, 4)),
    "roll of two": (lambda x, i: x.roll((i, 1), (0, 2)), (1, 2, 3, 4)),
    "roll flat": (lambda x, i: x.roll(i), (1, 2, 3, 4)),
    "layer norm": (lambda x, e: F.layer_norm(x, (8,), eps=e), (1e-5, 1e-3, 0.1, 1.0)),
    "group norm": (lambda x, e: F.group_norm(x, 3, eps=e), (1e-5, 1e-3, 0.1, 1.0)),
    "norm": (lambda x, p: x.norm(p), (2.0, 3.0, 4.5, float("inf"), -float("inf"), 0.0, 1.0)),
    "norm of whole order": (lambda x, p: torch.linalg.vector_norm(x, p, dim=1), (3, 2, 0, 1)),
    "distance": (lambda x, p: torch.dist(x, x.flip(0), p), (2.0, 3.0, 4.5, float("inf"))),
    "kth value": (lambda x, k: x.kthvalue(k), (1, 2, 3, 4)),
    "attention": (lambda x, s: F.scaled_dot_product_attention(x, x, x, scale=s), (0.1, 0.2, 0.3)),
    "power": (lambda x, e: x.abs() ** e, (2, 3, 4, 5)),
    "beta": (lambda x, b: F.smooth_l1_loss(x, x.flip(0), beta=b), (1.0, 0.1, 0.2)),
    "range": (lambda x, i: torch.arange(i, i + 4, device=x.device) + 1, (0, 1, 2, 5)),
}


def matches(ours: Any, theirs: Any) -> None:
    for a, b in zip(*(t if isinstance(t, tuple) else (t,) for t in (ours, theirs)), strict=True):
        torch.testing.assert_close(a.cpu(), b)


@pytest.fixture
def x() -> torch.Tensor:
    x = torch.randn(4, 6, 8)
    x.to("xla")
    torch_xla.sync()
    cache.clear()
    return x


@pytest.mark.parametrize("name", VARYING)
def test_two_graphs(name: str, x: torch.Tensor, compiles: Counting) -> None:
    step, numbers = VARYING[name]
    device = x.to("xla")
    results = []
    with compiles(2):
        for number in numbers:
            results.append(step(device, number))
            torch_xla.sync()
    for ours, number in zip(results, numbers, strict=True):
        matches(ours, step(x, number))


def test_views_that_are_read(x: torch.Tensor) -> None:
    """A graph that is cut again has the same nodes, or what is found out about their numbers is lost each time."""
    for dim in (0, 1, 0):
        y = torch.ones(1, 1, 4).to("xla").squeeze(dim)
        torch_xla.sync()
        assert y.cpu().shape == (1, 4)
        assert y[0].cpu().tolist() == [1.0] * 4


STRUCTURAL: dict[str, tuple[Step, Sequence[Any]]] = {
    "sum": (lambda x, d: x.sum(d), (0, 1, 2)),
    "sum of two": (lambda x, d: x.sum(d), ((0, 1), (1, 2), (0, 2))),
    "permute": (lambda x, d: x.permute(d) + 1, ((0, 2, 1), (1, 0, 2), (2, 1, 0))),
    "cumsum": (lambda x, d: x.cumsum(d), (0, 1, 2)),
    "softmax": (lambda x, d: x.softmax(d), (0, 1, 2)),
    "pad": (lambda x, d: F.pad(x, (d, 4 - d)), (0, 1, 2, 3)),
    "flip": (lambda x, d: x.flip(d), (0, 1, 2)),
    "sort": (lambda x, d: x.sort(d), (0, 1, 2)),
    "convolution": (lambda x, d: F.conv1d(x, x[:2, :, :3], padding=d, dilation=1 + d), (0, 1, 2)),
}


@pytest.mark.parametrize("name", STRUCTURAL)
def test_a_graph_each_where_the_program_needs_the_value(name: str, x: torch.Tensor, compiles: Counting) -> None:
    """What cannot be lowered without its value costs no more graphs than it has values."""
    step, numbers = STRUCTURAL[name]
    cube = x[:4, :4, :4].contiguous()
    device = cube.to("xla")
    torch_xla.sync()
    results = []
    with compiles() as compiled:
        for _ in range(2):
            for number in numbers:
                results.append(step(device, number))
                torch_xla.sync()
    assert compiled.value <= len(numbers)
    for ours, number in zip(results, [*numbers, *numbers], strict=True):
        matches(ours, step(cube, number))


def test_what_was_compiled_before_a_number_varied_is_not_compiled_again(x: torch.Tensor, compiles: Counting) -> None:
    device = x.to("xla")

    def other() -> torch.Tensor:
        result = device.roll(3, 2).cos()
        torch_xla.sync()
        return result

    other()
    for i in range(1, 4):
        device.roll(i, 1).sin()
        torch_xla.sync()
    with compiles(0):
        for _ in range(3):
            result = other()
    matches(result, x.roll(3, 2).cos())


def test_a_probability_of_zero_draws_nothing(x: torch.Tensor) -> None:
    """Other graphs though they differ in a number: one takes a seed."""
    ones = torch.ones(8, 16, 4, 4).to("xla")
    for p in (0.0, 0.5, 0.0, 0.25):
        result = F.scaled_dot_product_attention(ones, ones, ones, dropout_p=p)
        torch_xla.sync()
        drawn = result.cpu().unique().numel()
        assert (drawn == 1) == (p == 0)


def test_a_preview_tells_nothing(x: torch.Tensor, compiles: Counting) -> None:
    device = x.to("xla")
    keys = {_bindings.Cut.of_tensors([device.roll(i, 1)]).preview().key for i in range(1, 4)}
    assert len(keys) == 3


@pytest.mark.costs("a process that imports all anew")
def test_the_first_graph_of_a_process_has_the_constants_of_later_ones() -> None:
    """The rules say what they want as constants when it is cut already, beside numbers that may vary."""
    done = python(
        "-c",
        """
import torch, torch_xla
from torch_xla._core.execute import pipeline
from torch_xla._core.graph import graph
run = pipeline._compile
def compile(cut, *rest):
    executable = run(cut, *rest)
    for node in graph.describe(cut).nodes if executable else ():
        if node.op.startswith(("aten.pow", "aten.slice.Tensor")):
            print(node.op, *node.args[1:])
    return executable
pipeline._compile = compile
x = torch.randn(4, 96).to("xla").requires_grad_()
torch_xla.sync()
a, b, c = x.split(32, 1)
loss = (a * b + c).pow(3.0).sum()
loss.backward()
torch_xla.sync()
""",
    )
    assert done.stdout.splitlines() == [
        "aten.slice.Tensor 1 0 32 1",
        "aten.slice.Tensor 1 32 64 1",
        "aten.slice.Tensor 1 64 96 1",
        "aten.pow.Tensor_Scalar 3.0",
        "aten.pow.Tensor_Scalar 2.0",
    ]


@pytest.mark.costs("a process that imports all anew")
def test_a_number_stays_no_input_because_less_was_known_at_the_first_cut(tmp_path: Path) -> None:
    """A process that finds its first graph on the disk learns of the rules' constants at its second."""
    program = """
import torch, torch_xla
import torch_xla.debug.metrics as met
x = torch.arange(8.0, device="xla").requires_grad_()
torch_xla.sync()
y = x * 2 + 1
torch_xla.sync()
y.square().mean().backward()
torch_xla.sync()
print(met.counter_value("UncachedCompile") or 0)
"""
    runs = [python("-c", program, XLA_PERSISTENT_CACHE_PATH=str(tmp_path)).stdout.split()[-1] for _ in range(2)]
    assert runs[0] != "0" and runs[1] == "0"


def test_all_numbers_are_constants_where_that_was_asked_for(x: torch.Tensor, compiles: Counting) -> None:
    """What was compiled before with numbers as inputs, or with others, is no program of such a graph."""
    device = x.to("xla")

    def step(x: torch.Tensor, number: float) -> torch.Tensor:
        return (x * number + int(4 * number)).roll(1, 0)[1] ** 3.0 + torch.full((8,), number, device=x.device)

    def run(number: float) -> torch.Tensor:
        result = step(device, number)
        torch_xla.sync()
        return result.cpu()

    def arguments() -> int:
        (line,) = (line for line in xm.get_stablehlo([step(device, 0.5)]).splitlines() if " @main(" in line)
        return line.partition(" -> ")[0].count("%arg")

    run(0.5)
    assert arguments() > 1
    _bindings.set_all_numbers_constant(True)
    try:
        with compiles(3):
            for number in (0.5, 0.25, 3.0, 0.25, 0.5):
                matches(run(number), step(x, number))
        assert arguments() == 1
    finally:
        _bindings.set_all_numbers_constant(False)
    with compiles(0):
        matches(run(0.5), step(x, 0.5))
