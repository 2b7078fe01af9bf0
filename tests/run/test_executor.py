"""Running: what is asynchronous, what is copied to the device, and how far the host may be ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from probes import sampled

import torch_xla
from torch_xla import _bindings
from torch_xla._core.execute import barrier
from torch_xla.core import xla_model as xm

pytestmark = pytest.mark.usefixtures("idle")

SIZE = 700


@pytest.fixture
def slow() -> Iterator[Any]:
    """A step of some 0.2 s on the device, compiled already."""
    x = torch.eye(SIZE).to("xla")

    def step() -> torch.Tensor:
        y = x
        for _ in range(20):
            y = (y @ x).cos()
        torch_xla.sync()
        return y

    step()
    torch_xla.sync(wait=True)
    yield step
    torch_xla.sync(wait=True)


def ready(tensor: torch.Tensor) -> bool:
    buffer = _bindings.buffer_of(tensor)
    assert buffer is not None
    return buffer.is_ready()


class TestAsynchrony:
    def test_a_barrier_returns_before_the_device_is_done(self, slow: Any) -> None:
        y = slow()
        assert not ready(y)
        assert y.cpu().shape == (SIZE, SIZE)

    def test_work_is_recorded_and_started_meanwhile(self, slow: Any) -> None:
        for _ in range(3):  # compiling, the first or second time, takes longer than the step
            y = slow()
            z = y.sum() * 2.5
            torch_xla.sync()
        assert not ready(z)
        assert z.item() == pytest.approx(y.cpu().sum().item() * 2.5, rel=1e-4)

    @pytest.mark.parametrize(
        "wait", [lambda: torch_xla.sync(wait=True), xm.wait_device_ops, lambda: barrier.wait(0), barrier.wait]
    )
    def test_waiting(self, slow: Any, wait: Any) -> None:
        y = slow()
        wait()
        assert ready(y)
        assert not _bindings.in_flight(0).programs

    def test_waiting_for_another_device_waits_not_for_this_one(self, slow: Any) -> None:
        y = slow()
        barrier.wait(1)
        assert not ready(y)

    def test_the_host_is_at_most_two_steps_ahead(self, slow: Any) -> None:
        results = [slow() for _ in range(4)]
        assert _bindings.in_flight(0).programs <= 2
        assert ready(results[0])
        assert ready(results[1])
        assert not ready(results[3])

    def test_other_threads_run_while_the_device_works(self, slow: Any) -> None:
        y = slow()
        ticked = threading.Event()
        thread = threading.Thread(target=ticked.set)
        thread.start()
        assert ticked.wait(5)
        thread.join()
        assert y.cpu().shape == (SIZE, SIZE)

    def test_tensors_may_be_dropped_before_they_are_computed(self, slow: Any) -> None:
        y = slow()
        z = y[0, :3] * 2.5
        torch_xla.sync()
        del y
        assert z.cpu().shape == (3,)


@pytest.mark.compiled("programs are started behind runs that fail")
class TestWhatFailsLate:
    """A run that was started and failed is found out where the next one waits for room."""

    @staticmethod
    def started(error: type[BaseException]) -> torch.Tensor:
        """A pending result, behind runs that fail once they are waited for."""

        class Failing:
            def __init__(self) -> None:
                self.asked = 0

            def block_until_ready(self) -> None:
                self.asked += 1
                if self.asked == 1 or error is ValueError:
                    raise error("RESOURCE_EXHAUSTED: Out of memory allocating 512 bytes.")

        x = torch.arange(5.0).to("xla")
        torch_xla.sync(wait=True)
        _bindings.in_flight(0).add_program(Failing())
        for _ in range(_bindings.MAX_PROGRAMS_IN_FLIGHT - 1):
            _bindings.in_flight(0).add_program(_bindings.buffer_of(x))
        return x * 3.5

    def test_memory_that_ran_out(self) -> None:
        y = self.started(ValueError)
        with pytest.raises(torch.OutOfMemoryError, match="a graph that was started did not fit"):
            torch_xla.sync()
        assert y.tolist() == [0, 3.5, 7, 10.5, 14]

    def test_an_interrupt(self) -> None:
        y = self.started(KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            torch_xla.sync()
        torch_xla.sync()
        assert y.tolist() == [0, 3.5, 7, 10.5, 14]


@pytest.mark.compiled("numbers are sent to programs")
class TestNumbers:
    def test_a_constant_rate_travels_once(self) -> None:
        x = torch.ones(5).to("xla")
        torch_xla.sync()
        with sampled("TransferToDeviceTime", 1):
            for _ in range(6):
                x.mul_(0.75)
                torch_xla.sync()
        assert x.tolist() == pytest.approx([0.75**6] * 5)

    def test_a_changing_rate_travels_once_per_step(self) -> None:
        x = torch.ones(5).to("xla")
        torch_xla.sync()
        with sampled("TransferToDeviceTime", 6):
            for i in range(6):
                x.add_(1.5 + i)
                torch_xla.sync()
        assert x.tolist() == [1.0 + 6 * 1.5 + 15] * 5

    def test_however_many_there_are(self) -> None:
        x = torch.ones(5).to("xla")
        torch_xla.sync()
        with sampled("TransferToDeviceTime", 3):
            for i in range(3):
                for k in range(40):
                    x.add_(0.5 + i + k)
                torch_xla.sync()

    def test_one_vector_per_type(self) -> None:
        x = torch.ones(5).to("xla")
        torch_xla.sync()
        with sampled("TransferToDeviceTime", 2):
            y = (x * 1.25 + 7) * 3.25 - 9
            torch_xla.sync()
        assert y.tolist() == [(1.25 + 7) * 3.25 - 9] * 5

    def test_a_vector_that_stays_beside_one_that_changes(self) -> None:
        x = torch.ones(5).to("xla")
        torch_xla.sync()
        with sampled("TransferToDeviceTime", 2 + 3):
            for i in range(4):
                y = x * (i + 1.25) + 7
                torch_xla.sync()
        assert y.tolist() == [11.25] * 5

    def test_numbers_that_compare_equal_but_are_not(self) -> None:
        x = torch.ones(2).to("xla")
        results = []
        for number in (0.0, -0.0, 0.0):
            results.append(torch.signbit(x * number))
            torch_xla.sync()
        assert [r.tolist() for r in results] == [[False] * 2, [True] * 2, [False] * 2]

    def test_the_device_keeps_old_numbers_while_it_needs_them(self, slow: Any) -> None:
        x = torch.eye(SIZE).to("xla")
        results = []
        for i in range(3):
            results.append((slow() @ x)[0, 0] * 0 + (i + 0.5))
            torch_xla.sync()
        assert [r.item() for r in results] == [0.5, 1.5, 2.5]

    def test_seeds_travel_with_them(self) -> None:
        x = torch.full((64,), 0.5).to("xla")
        torch_xla.sync()
        draws = []
        with sampled("TransferToDeviceTime", 3):
            for _ in range(3):
                draws.append(torch.bernoulli(x) * x)
                torch_xla.sync()
        assert len({tuple(d.tolist()) for d in draws}) == 3

    def test_a_random_tensor_that_is_kept_costs_no_copy(self) -> None:
        with sampled("TransferToDeviceTime", 3):
            for _ in range(3):
                noise = torch.randn(64, 64, device="xla")
                torch_xla.sync()
        assert noise.shape == (64, 64)
