"""A signal handler that reads, runs a barrier or replays may come between any two lines of the package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from probes import python

import torch_xla
from torch_xla import _bindings
from torch_xla._core.execute import op_by_op, pipeline

PACKAGE = str(Path(torch_xla.__file__).parent)


class AtLine:
    """Calls a handler before one of the lines of the package that run, by their number."""

    def __init__(self, number: int, handler: Callable[[], object]) -> None:
        self.number, self.handler = number, handler
        self.lines = 0

    @property
    def came(self) -> bool:
        return self.lines >= self.number

    def __call__(self, frame: FrameType, event: str, _: Any) -> AtLine | None:
        if not frame.f_code.co_filename.startswith(PACKAGE) or self.came:
            return None
        self.lines += event == "line"
        if self.came:
            self.handler()  # in which nothing is traced
        return self


@contextmanager
def traced(at: AtLine) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(at)
    try:
        yield
    finally:
        sys.settrace(before)


class State:
    """A model of two tensors on a device, and what is recorded of it."""

    def __init__(self, device: str, size: int) -> None:
        self.weight = torch.arange(float(size)).to(device)
        self.total = torch.ones(size).to(device)
        self.step()
        if device == "xla":
            torch_xla.sync()
        self.step()

    def step(self) -> None:
        self.result = (self.weight * 0.5).cos()
        self.total.add_(self.result)
        self.weight = self.result + 1

    def values(self) -> list[list[float]]:
        return [t.tolist() for t in (self.weight, self.total, self.result)]


def _add(state: State) -> None:
    state.total.add_(1)
    torch_xla.sync()


ASKS: dict[str, Callable[[State], object]] = {
    "a barrier": lambda state: torch_xla.sync(),
    "a read": lambda state: state.total.cpu(),
    "a small read": lambda state: state.total.sum().item(),
}
HANDLERS: dict[str, Callable[[State], object]] = {
    "reads": lambda state: state.total.sum().item(),
    "runs a barrier": lambda state: torch_xla.sync(),
    "writes": _add,
}


@pytest.mark.by_default("new graphs run op by op")
class TestAtEachLine:
    @pytest.mark.parametrize("handler", HANDLERS)
    @pytest.mark.parametrize("ask", ASKS)
    @pytest.mark.parametrize("new", [True, False], ids=["a new graph", "a program"])
    @pytest.mark.costs("hundreds of small graphs")
    def test_a_barrier_or_read_is_as_without(self, new: bool, ask: str, handler: str) -> None:
        number = 0
        while True:
            number += 1 + number // 12
            size = 4 + number if new else 3
            expected, state = State("cpu", size), State("xla", size)
            at = AtLine(number, lambda: HANDLERS[handler](state))  # noqa: B023
            with traced(at):
                ASKS[ask](state)
            if not at.came:
                break
            expected.total.add_(handler == "writes")
            torch.testing.assert_close(state.values(), expected.values(), msg=lambda m: f"line {number}: {m}")  # noqa: B023
        assert number > 10
        assert _bindings.in_flight(0).operator_run is None

    @pytest.mark.parametrize("handler", ["replays", "reads", "writes"])
    @pytest.mark.costs("hundreds of replays")
    def test_a_replay_is_as_without(self, handler: str) -> None:
        total, source = torch.zeros(3).to("xla"), torch.ones(3).to("xla")
        graph = torch_xla.Graph()
        with graph:
            total.add_(source)
            drawn = torch.rand(2, device="xla")

        def handle() -> None:
            if handler == "replays":
                graph.replay()
            elif handler == "writes":
                total.add_(1)
                torch_xla.sync()
            else:
                total.sum().item()

        expected, number = 0, 0
        numbers: list[float] = []
        torch.manual_seed(1)
        while True:
            number += 1
            at = AtLine(number, handle)
            with traced(at):
                graph.replay()
            if not at.came:
                break
            expected += 1 if handler == "reads" else 2
            assert total.tolist() == [expected] * 3, number
            numbers += drawn.tolist()
        assert number > 10 and len(set(numbers)) == len(numbers)


class TestBetweenMakingAndRegistering:
    """A run that is made, and is nobody's yet."""

    @pytest.mark.by_default("new graphs run op by op")
    def test_of_a_run(self, monkeypatch: pytest.MonkeyPatch) -> None:
        x = torch.arange(6.0).to("xla")
        y = torch.tanh(x * 2).sum()
        z = y * 2
        prepare = op_by_op.prepare
        runs: list[_bindings.OpByOpRun] = []

        def prepared(graph: _bindings.Graph) -> _bindings.OpByOpRun:
            running = prepare(graph)
            runs.append(running)
            if len(runs) == 1:
                assert y.item() == pytest.approx(torch.tanh(torch.arange(6.0) * 2).sum().item())
            return running

        monkeypatch.setattr(op_by_op, "prepare", prepared)
        pipeline.run(_bindings.Cut.of_device(0), "test", False)
        assert z.item() == pytest.approx(2 * y.item())
        assert runs[0].start()  # it is over
        runs[0].finish()

    def test_a_stale_run_says_so(self) -> None:
        x = torch.arange(6.0).to("xla")
        y = (x * 2).cos()
        for act in ("start", "finish"):
            running = op_by_op.prepare(_bindings.Cut.of_device(0).graph())
            torch_xla.sync(wait=True)
            with pytest.raises(_bindings.StaleGraph):
                getattr(running, act)()
            with pytest.raises(_bindings.StaleGraph):
                _bindings.in_flight(0).operator_run = op_by_op.prepare(_stale())
            y = y + 1
        torch.testing.assert_close(y.cpu(), (torch.arange(6.0) * 2).cos() + 2)


def _stale() -> _bindings.Graph:
    x = torch.arange(3.0).to("xla") + 1
    graph = _bindings.Cut.of_device(0).graph()
    x.tolist()
    return graph


PROGRAM = """
import os, signal, sys, time
import torch, torch_xla
x = torch.ones(3).to("xla")
asked = []

def handler(*_):
    print("reads", x.sum().item())

class Finder:  # asked in the thread that imports
    def find_spec(self, name, path, target=None):
        module = sys.modules.get("torch_xla._core.execute.pipeline")
        if module is not None and not hasattr(module, "run") and not asked:
            asked.append(name)
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.2)

signal.signal(signal.SIGUSR1, handler)
sys.meta_path.insert(0, Finder())
y = x + 1
torch_xla.sync()
assert asked
print("then", y.tolist(), (x + 2).tolist())
"""


def test_while_the_stages_are_imported() -> None:
    done = python("-c", PROGRAM)
    assert done.stdout.splitlines() == ["reads 3.0", "then [2.0, 2.0, 2.0] [3.0, 3.0, 3.0]"], done.stderr
