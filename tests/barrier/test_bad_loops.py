"""Programs in which no loop is to be found, and loops whose pieces fail or are interrupted."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Counting
from probes import cuts
from torch import Tensor

import torch_xla
from torch_xla import _bindings
from torch_xla._core.compile import cache, compiler
from torch_xla.ops import registry

pytestmark = pytest.mark.usefixtures("short_loops")

LIBRARY = torch.library.Library("looping", "DEF")
LIBRARY.define("probe(Tensor x) -> Tensor")
LIBRARY.impl("probe", lambda x: torch.empty_like(x), "Meta")
FIRST_LOOK = 100  # as short_loops has it


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The node sequence at each search."""
    results: list[int] = []
    find = _bindings.find_loop

    def counted(device: int, growing: bool = False) -> Any:
        if not growing:  # it looks for both, at the same place
            results.append(_bindings.node_sequence())
        return find(device, growing)

    monkeypatch.setattr(_bindings, "find_loop", counted)
    return results


def test_a_body_that_changes_in_each_turn(compiles: Counting) -> None:
    before, results = cuts(), []
    for device in ("cpu", "xla"):
        x = torch.linspace(0, 1, 6).to(device)
        for turn in range(40):
            for _ in range(5):
                x = (x.repeat(turn + 2)[:6] * 0.9).sin()
        with compiles() as count:
            results.append(x.cpu())
    torch.testing.assert_close(*results)
    assert cuts() == before and count.value == 1


def aperiodic(calls: int) -> None:
    chosen = random.Random(0)
    x = torch.zeros(2, device="xla")
    for _ in range(calls):
        x = x.sin() if chosen.random() < 0.5 else x.cos()


def searched(looks: list[int]) -> None:
    """Each look is at a window a quarter longer than the one before, so all together are linear."""
    assert sum(b - looks[0] + FIRST_LOOK for b in looks) < 6 * (looks[-1] - looks[0] + FIRST_LOOK)


def test_calls_without_a_period(looks: list[int]) -> None:
    before = cuts()
    aperiodic(10_000)
    assert cuts() == before and 10 < len(looks) <= math.log(10_000 / FIRST_LOOK, 1.25) + 1
    searched(looks)


@pytest.mark.sweep
def test_a_million_calls_without_a_period(looks: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    before = cuts()
    aperiodic(1_000_000)
    rounds = 1_000_000 / _bindings.LONGEST_TRACE
    per_round = math.log(_bindings.LONGEST_TRACE / FIRST_LOOK, 1.25) + 2
    assert cuts() == before and len(looks) <= math.ceil(rounds) * per_round
    told = [line for line in capfd.readouterr().err.splitlines() if "do not repeat" in line]
    assert len(told) == 1 and "test_bad_loops.py" in told[0]


def test_a_loop_of_one_operator(compiles: Counting) -> None:
    x = torch.zeros(3, device="xla")
    before = cuts()
    with compiles() as count:
        for _ in range(500):
            x = x + 1.0
        assert x.tolist() == [500.0] * 3
    assert cuts() - before > 10 and count.value <= 4


class Both:
    """The same calls on both devices, CPU first, so that what they write is equal also where one raised after that."""

    def __init__(self) -> None:
        self.states = [(torch.linspace(0, 1, 6).to(d), torch.linspace(1, 2, 6).to(d)) for d in ("cpu", "xla")]

    def turn(self) -> None:
        for _ in range(12):
            self.each(lambda x, y: x.mul_(0.9))
            self.each(lambda x, y: x.add_(y, alpha=0.1))
            self.each(lambda x, y: y.add_(x))
            self.each(lambda x, y: y.tanh_())

    def each(self, call: Callable[[Tensor, Tensor], Tensor]) -> None:
        for x, y in self.states:
            call(x, y)

    def check(self) -> None:
        cpu, ours = self.states
        torch.testing.assert_close(tuple(t.cpu() for t in ours), cpu)


def test_an_operator_that_fails_in_each_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not need it goes on as if it were not there."""

    def broken(ctx: Any, x: Any) -> Any:
        raise KeyError("no such thing")

    monkeypatch.setitem(registry._RULES, "looping.probe.default", broken)
    both = Both()
    kept, failures = [], []
    for _ in range(16):
        try:
            kept.append(torch.ops.looping.probe(both.states[1][1]))
            both.turn()
        except RuntimeError as failure:
            failures.append(failure)
    with pytest.raises(RuntimeError, match=r"lower looping.probe"):
        torch_xla.sync()
    assert failures and all("[lower looping.probe.default] KeyError" in str(failure) for failure in failures)
    assert all("test_bad_loops.py" in str(failure.__traceback__.tb_frame) for failure in failures)
    both.check()
    with pytest.raises(RuntimeError, match="make it again"):
        kept[0].cpu()


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_a_piece(interrupt: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes where the loop is; what was to be cut is cut later, and nothing is lost."""
    compile_lowered = compiler.compile_lowered
    left = [interrupt]
    cache.clear()

    def interrupted(*args: Any) -> Any:
        if left:
            raise left.pop()
        return compile_lowered(*args)

    monkeypatch.setattr(compiler, "compile_lowered", interrupted)
    both = Both()
    with pytest.raises(interrupt):
        for _ in range(16):
            both.turn()
    before = cuts()
    for _ in range(16):
        both.turn()
    assert cuts() - before > 8
    both.check()
