"""What runs on a device has one owner: interrupts, signal handlers, other threads, forks and the exit all ask it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from probes import python

import torch_xla
from torch_xla import _bindings
from torch_xla._core.compile import compiler
from torch_xla._core.device import transfer
from torch_xla._core.execute import pipeline
from torch_xla.ops import registry

pytestmark = pytest.mark.by_default("new graphs are not compiled")

LIBRARY = torch.library.Library("in_flight", "DEF")
LIBRARY.define("broken(Tensor x) -> Tensor")
LIBRARY.impl("broken", torch.empty_like, "Meta")
matrix = torch.randn(300, 300) / 20


def work(rounds: int) -> torch.Tensor:
    """A graph of which the host does not see the end at once."""
    x = first = matrix.to("xla")
    for _ in range(rounds):
        x = (x @ first).tanh()
    return x


def expected(rounds: int) -> torch.Tensor:
    x = matrix
    for _ in range(rounds):
        x = (x @ matrix).tanh()
    return x


@pytest.fixture(autouse=True)
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def rule(ctx: Any, x: Any) -> Any:
        raise KeyError("no such thing")

    monkeypatch.setitem(registry._RULES, "in_flight.broken.default", rule)


@pytest.fixture
def handler() -> Iterator[list[Any]]:
    """What is in the list is called by a signal handler, and its results are added to the end."""
    calls: list[Any] = []
    before = signal.signal(signal.SIGALRM, lambda *_: calls.append(calls[0]()))
    yield calls
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


class TestInterrupts:
    def test_a_run_that_has_ended_is_not_finished_twice(self, when_hot: None) -> None:
        x = work(6)
        torch_xla.sync()
        running = _bindings.in_flight(0).operator_run
        assert running is not None
        pipeline.finish(0)
        running.finish()  # as where an interrupt came between its end and the note of it
        assert _bindings.in_flight(0).operator_run is None
        torch.testing.assert_close(x.cpu(), expected(6))

    def test_at_any_moment(self, when_hot: None) -> None:
        """Each barrier and read is interrupted now and then, and asked for again."""

        class Now(BaseException):
            pass

        def now(*_: Any) -> None:
            raise Now

        def again(ask: Any, after: float) -> Any:
            while True:
                try:
                    signal.setitimer(signal.ITIMER_REAL, after)
                    try:
                        return ask()
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                except Now:
                    interrupts.append(after)
                    after *= 2

        def program(device: str) -> list[torch.Tensor]:
            w, total = matrix.to(device).clone(), torch.zeros((), device=device)
            for i in range(12):
                y = torch.tanh(w @ w)
                for _ in range(i % 3):
                    y = y * 1.01 + i
                kept = w.clone()
                w.mul_(0.99).add_(y, alpha=0.001)
                total.add_(y.mean())
                if device == "xla":
                    again(torch_xla.sync, 0.0005 * (i % 5 + 1))
                w.add_(kept, alpha=0.01)
            return [again(tensor.cpu, 0.002) if device == "xla" else tensor for tensor in (w, total)]

        interrupts: list[float] = []
        before = signal.signal(signal.SIGALRM, now)
        try:
            torch.testing.assert_close(program("xla"), program("cpu"))
        finally:
            signal.signal(signal.SIGALRM, before)
        assert interrupts


class TestBarriersInsideBarriers:
    @pytest.mark.compiled("its lowering is interrupted")
    def test_while_a_graph_is_lowered(self, handler: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        """As a handler does that saves a checkpoint when the machine is about to be taken away."""
        lower = compiler.lower

        def interrupted(*arguments: Any) -> Any:
            monkeypatch.undo()
            os.kill(os.getpid(), signal.SIGALRM)
            time.sleep(0.2)
            return lower(*arguments)

        x, weight = matrix.to("xla"), torch.ones(300, 300, device="xla")
        torch_xla.sync()
        y = (x @ x).tanh()
        weight.add_(y)
        handler.append(lambda: (weight.cpu(), torch_xla.sync()))
        monkeypatch.setattr(compiler, "lower", interrupted)
        torch_xla.sync()
        reference = 1 + (matrix @ matrix).tanh()
        torch.testing.assert_close(handler[1][0], reference)
        torch.testing.assert_close(weight.cpu(), reference)
        assert (weight - y)[0, 0].item() == pytest.approx(1, abs=1e-5)

    def test_while_a_graph_runs_ahead(self, handler: list[Any], when_hot: None) -> None:
        x = work(60)
        torch_xla.sync()
        handler.append(lambda: (x.cpu(), torch_xla.sync()))
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        torch_xla.sync(wait=True)
        time.sleep(0.05)
        torch.testing.assert_close(handler[1][0], expected(60))
        torch.testing.assert_close(x.cpu(), expected(60))

    @pytest.mark.compiled("its lowering is interrupted")
    def test_what_a_handler_raises_is_no_failure_of_the_graph(self, monkeypatch: pytest.MonkeyPatch) -> None:
        lower = compiler.lower

        def late(*_: Any) -> None:
            raise TimeoutError("too late")

        def slow(*arguments: Any) -> Any:
            monkeypatch.undo()
            os.kill(os.getpid(), signal.SIGALRM)
            time.sleep(0.2)
            return lower(*arguments)

        before = signal.signal(signal.SIGALRM, late)
        try:
            x = torch.ones(300, 300, device="xla")
            torch_xla.sync()
            x.add_(matrix.to("xla"))
            monkeypatch.setattr(compiler, "lower", slow)
            with pytest.raises(TimeoutError, match="too late"):
                torch_xla.sync()
        finally:
            signal.signal(signal.SIGALRM, before)
        torch.testing.assert_close(x.cpu(), 1 + matrix)


class TestFailuresAreToldOnce:
    def test_after_a_fork(self, when_hot: None) -> None:
        column = torch.ones(3_000_000, 1).to("xla")
        torch_xla.sync()
        x = work(20)
        x.add_((column @ column.T).sum())  # 36 TB
        torch_xla.sync()
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(torch.OutOfMemoryError):
            torch_xla.sync()
        torch_xla.sync()

    @pytest.mark.parametrize("waits", ["", "torch_xla.sync(wait=True)"])
    def test_at_the_end_of_the_program(self, waits: str) -> None:
        program = f"""
import torch, torch_xla
first = x = torch.randn(400, 400).to("xla")
column = torch.ones(3_000_000, 1).to("xla")
for _ in range(20):
    x = (x @ first).tanh()
kept = (column @ column.T).sum() + x.sum()
torch_xla.sync()
try:
    {waits or "pass"}
except torch.OutOfMemoryError:
    print("told")
"""
        done = python("-c", program, check=False, imported=True, XLA_HOST_COMPUTE="new")
        assert done.returncode == (0 if waits else 1)
        assert ("told" in done.stdout) == bool(waits) and ("out of memory" in done.stderr) != bool(waits)


class TestValuesAtTheBarrier:
    """What a failure gives a tensor back is what it had at the last barrier, however it came to have it."""

    def fail(self, x: torch.Tensor) -> None:
        x.add_(torch.ops.in_flight.broken(x))
        with pytest.raises(RuntimeError, match="no such thing"):
            torch_xla.sync(wait=True)

    def test_of_another_tensor(self, when_hot: None) -> None:
        x, other = torch.arange(4.0).to("xla"), torch.arange(10.0, 14.0).to("xla")
        torch_xla.sync(wait=True)
        old = x * 2 + work(6).sum() * 0
        x.copy_(other)
        torch_xla.sync()
        x.add_(1)
        self.fail(x)
        assert x.tolist() == [10, 11, 12, 13] and old.tolist() == [0, 2, 4, 6]

    def test_of_a_tensor_made_in_the_step_before(self, when_hot: None) -> None:
        x = torch.arange(4.0).to("xla")
        torch_xla.sync(wait=True)
        y = x * 2 + work(6).sum() * 0
        torch_xla.sync()
        y.add_(1)
        self.fail(y)
        assert y.tolist() == [0, 2, 4, 6]

    def test_of_a_storage_that_grew(self, when_hot: None) -> None:
        x = torch.arange(4.0).to("xla")
        torch_xla.sync(wait=True)
        x.resize_(6)
        x[4:] = 7
        beside = work(6)
        torch_xla.sync()
        x.mul_(2)
        self.fail(x)
        assert x.tolist() == [0, 1, 2, 3, 7, 7]
        torch.testing.assert_close(beside.cpu(), expected(6))

    @pytest.mark.compiled("a failed operator is no part of a program")
    def test_before_a_cut_that_lies_further_back(self) -> None:
        x = torch.arange(4.0).to("xla")
        torch_xla.sync(wait=True)
        y = x * 2
        until = _bindings.node_sequence()
        y.add_(1)
        pipeline.run(_bindings.Cut.of_device(0, until), "test", False)
        self.fail(y)
        assert y.tolist() == [0, 2, 4, 6]


def test_a_clone_made_while_a_program_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As another thread may do: the snapshot's buffer is on its way to be written over."""
    p = torch.zeros(256, 256).to("xla")
    for step in range(3):  # the same program each time
        torch_xla.sync(wait=True)
        snapshot = p.clone()
        made: list[torch.Tensor] = []
        copies = transfer.copies

        def copy(buffers: list[Any], snapshot: torch.Tensor = snapshot, made: Any = made, copies: Any = copies) -> Any:
            made.append(snapshot.clone())
            return copies(buffers)

        p.add_(1)
        with monkeypatch.context() as patch:
            patch.setattr(transfer, "copies", copy)
            torch_xla.sync(wait=True)
        del copy
        for tensor in (snapshot, *made):
            assert tensor[0, 0].item() == step
    assert made and p[0, 0].item() == 3


def test_a_stream_has_passed_what_was_computed(when_hot: None) -> None:
    streams = [torch.xla.current_stream(), torch.Stream(device="xla")]
    event = torch.Event(device="xla")
    for stream in streams:
        x = work(60)
        assert not stream.query()  # it is started, and not waited for
        event.record(torch.Stream(device="xla"))
        event.synchronize()
        assert event.query() and stream.query()
        torch.testing.assert_close(x.cpu(), expected(60))


def test_a_kernel_without_memory_is_told_of(when_hot: None) -> None:
    """What a result is made dense with is a part of the run as its kernel is."""
    program = """
import resource
import torch, torch_xla
x = torch.ones(30_000_000, dtype=torch.complex64).to("xla")
busy = torch.randn(500, 500).to("xla")
torch_xla.sync(wait=True)
for _ in range(5):
    busy = busy @ busy * 1e-3
out = torch.view_as_real(torch.conj(x))[:4].sum() + busy.sum() * 0
used = int(open("/proc/self/statm").read().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (used + 150_000_000, resource.getrlimit(resource.RLIMIT_AS)[1]))
try:
    torch_xla.sync(wait=True)
except torch.OutOfMemoryError:
    print("told")
"""
    env = {"XLA_HOST_COMPUTE": "new", "XLA_CPU_KEEP_MEMORY": "0"}
    assert python("-c", program, imported=True, **env).stdout.strip() == "told"
