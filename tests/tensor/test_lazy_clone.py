"""Clones of leaves: graphs keep their keys while the two agree and after, and nothing is copied without need."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from probes import sampled
from torch import nn

import torch_xla
from torch_xla import _bindings
from torch_xla._core.compile import cache
from torch_xla._core.device import transfer

SIZE = 20_000  # too large for the host to compute
STEPS = 5


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many buffers each call of `transfer.copies` copied."""
    calls: list[int] = []
    original = transfer.copies

    def copies(buffers: list[object]) -> list[object]:
        calls.append(len(buffers))
        return original(buffers)

    monkeypatch.setattr(transfer, "copies", copies)
    return calls


def on_xla(number: float) -> torch.Tensor:
    return torch.full((SIZE,), number).to("xla")


class Loop:
    """A model under training, on any device; `after` sees it after each step."""

    def __init__(self, device: str, after: Callable[[Loop, int], None] = lambda loop, index: None) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 80), nn.Tanh(), nn.Linear(80, 200)).to(device)
        torch_xla.sync()
        self.other = copy.deepcopy(self.model).requires_grad_(False)
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.inputs = torch.linspace(-1, 1, 32).view(4, 8).to(device)
        self.after = after
        self.kept: list[torch.Tensor] = []

    def run(self) -> list[torch.Tensor]:
        """Final weights of the model and of its copy, and what was kept, on the host."""
        for index in range(STEPS):
            self.optimizer.zero_grad()
            loss = (self.model(self.inputs) - self.other(self.inputs) - 1).square().mean()
            loss.backward()
            self.optimizer.step()
            self.after(self, index)
            torch_xla.sync()
        with torch.no_grad():
            return [t.detach().cpu() for t in [*self.model.parameters(), *self.other.parameters(), *self.kept]]


def check(
    after: Callable[[Loop, int], None], compiles: int, prepare: Callable[[Loop], None] = lambda loop: None
) -> None:
    """The loop compiles so often and has the values that it has on the CPU."""
    host, loop = Loop("cpu", after), Loop("xla", after)
    prepare(host)
    prepare(loop)
    expected = host.run()
    cache.clear()
    with sampled("CompileTime", compiles):
        result = loop.run()
    torch.testing.assert_close(result, expected)


@torch.no_grad()
def average(loop: Loop, index: int) -> None:
    for ours, theirs in zip(loop.other.parameters(), loop.model.parameters(), strict=True):
        ours.lerp_(theirs, 0.25)


def snapshot(loop: Loop, index: int) -> None:
    if index % 2 == 0:
        loop.kept = [p.detach().clone() for p in loop.model.parameters()]


@torch.no_grad()
def snapshot_of_leaves(loop: Loop, index: int) -> None:
    torch_xla.sync()
    snapshot(loop, index)


class ScheduleFree(torch.optim.Optimizer):
    """Has a second set of weights, which its first step makes of the first."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if "z" not in state:
                state["z"] = p.clone()
            state["z"].sub_(p.grad, alpha=0.1)
            p.lerp_(state["z"], 0.25)


class TestOneProgram:
    def test_for_a_model_and_its_moving_average(self) -> None:
        check(average, 1)

    def test_for_steps_with_and_without_a_snapshot(self) -> None:
        check(snapshot, 1)

    def test_for_snapshots_between_steps(self) -> None:
        check(snapshot_of_leaves, 1)

    def test_for_a_copied_model_that_is_left_alone(self) -> None:
        check(lambda loop, index: None, 1)

    @pytest.mark.compiled("it counts what programs take")
    def test_for_values_that_shared_one_at_the_barrier(self) -> None:
        x = on_xla(1.5).sin()
        y = x.clone()  # of a pending value
        torch_xla.sync()
        counts = []
        for _ in range(3):
            x.mul_(0.5)
            y.add_(x)
            counts.append(len(_bindings.Cut.of_device(0).graph().donated))
            torch_xla.sync()
        assert counts == [2, 2, 2]

    def test_for_an_optimizer_whose_state_starts_as_the_weights(self) -> None:
        check(
            lambda loop, index: None, 1, lambda loop: setattr(loop, "optimizer", ScheduleFree(loop.model.parameters()))
        )


class TestCopies:
    def test_none_for_a_clone_that_is_gone_at_the_barrier(self, copied: list[int]) -> None:
        x = on_xla(1.5)
        for _ in range(3):
            y = (x.clone() * 2).add_(x)
            x.mul_(0.5)
            torch_xla.sync()
        assert copied == []
        assert y[0].item() == 1.125

    @pytest.mark.compiled(
        "a part that is read is taken on the host in use, and no program takes the clone", reads=False
    )
    def test_none_for_one_that_is_only_read(self, copied: list[int]) -> None:
        x = on_xla(1.5)
        y = x.clone()
        assert y[:2].tolist() == y.cpu()[:2].tolist() == [1.5, 1.5]
        assert copied == []

    @pytest.mark.compiled("programs write over originals")
    def test_one_when_the_original_is_written_over(self, copied: list[int]) -> None:
        x = on_xla(1.5)
        y, z = x.clone(), x.clone().clone()
        for _ in range(3):
            x.mul_(0.5)
            torch_xla.sync()
        assert copied == [2]  # both at once
        assert (y[0].item(), z[0].item()) == (1.5, 1.5)

    def test_one_when_a_program_takes_it(self, copied: list[int]) -> None:
        x = on_xla(1.5)
        y = x.clone()
        for _ in range(3):
            kept = (x + y).sin()
            torch_xla.sync()
        assert copied == [1]
        assert kept[0].item() == pytest.approx(torch.tensor(3.0).sin().item())


class TestValues:
    def test_outlive_the_original(self) -> None:
        x = on_xla(1.5)
        y = x.clone()
        del x
        y.mul_(2)
        torch_xla.sync()
        assert y[0].item() == 3.0

    def test_buffers_are_apart(self) -> None:
        x = on_xla(1.5)
        y = x.clone()
        ours, theirs = _bindings.buffer_of(x), _bindings.buffer_of(y)
        assert ours.unsafe_buffer_pointer() != theirs.unsafe_buffer_pointer()

    def test_stay_on_their_device(self) -> None:
        x = on_xla(1.5).to("xla:1")
        y = x.clone()
        x.add_(1)
        torch_xla.sync(wait=True)
        assert _bindings.buffer_of(y).device == _bindings.buffer_of(x).device
        assert y[0].item() == 1.5

    @pytest.mark.compiled("programs write over fills")
    def test_of_fills(self) -> None:
        x = torch.full((SIZE,), 2.5, device="xla")
        y = x.clone()
        for _ in range(2):
            x.mul_(2)
            y.add_(x)
            assert len(_bindings.Cut.of_device(0).graph().donated) == 2
            torch_xla.sync()
        assert (x[0].item(), y[0].item()) == (10.0, 17.5)

    def test_of_a_whole_tensor_that_is_overwritten(self) -> None:
        x, y = on_xla(1.5), on_xla(4.0)
        y.copy_(x)
        x.add_(1)
        torch_xla.sync()
        assert (x[0].item(), y[0].item()) == (2.5, 1.5)

    @pytest.mark.own_client("an operator of the host fails at its line")
    def test_come_back_after_a_failure(self) -> None:
        x = on_xla(1.5)
        y = x.clone()

        def fail(tensor: torch.Tensor) -> torch.Tensor:
            raise ValueError("not today")

        with torch.library._scoped_library("lazy_clone", "FRAGMENT") as library:
            library.define("fail(Tensor x) -> Tensor")
            library.impl("fail", fail, "CPU")
            library.impl("fail", torch.empty_like, "Meta")
            y.add_(torch.ops.lazy_clone.fail(x))
            with pytest.raises(RuntimeError, match="not today"):
                torch_xla.sync(wait=True)
        assert (x[0].item(), y[0].item()) == (1.5, 1.5)

    def test_many_that_come_and_go(self) -> None:
        x = on_xla(1.5)
        for _ in range(1000):
            y = x.clone()
        x.add_(1)
        torch_xla.sync()
        assert (x[0].item(), y[0].item()) == (2.5, 1.5)

    def test_of_what_another_thread_computes_and_reads(self) -> None:
        x = on_xla(1.5)
        shared: list[torch.Tensor] = []
        stop = threading.Event()
        failures: list[Exception] = []

        def clone() -> None:
            while not stop.is_set():
                for tensor in list(shared):
                    try:
                        tensor.clone().add_(1)
                    except Exception as error:
                        failures.append(error)

        thread = threading.Thread(target=clone)
        thread.start()
        try:
            for _ in range(50):
                shared[:] = [x * 2.5, x * 3.5]
                torch_xla.sync()
                assert [t[0].item() for t in shared] == [3.75, 5.25]
        finally:
            stop.set()
            thread.join()
        assert not failures

    def test_a_placeholder_has_none(self) -> None:
        import torch_xla.core.xla_builder as xb

        x = xb.create_placeholder_tensor((4,), torch.float32)
        y = x.clone() + 1
        assert "add" in torch_xla._XLAC._get_xla_tensors_text([y])
        torch_xla.sync()
