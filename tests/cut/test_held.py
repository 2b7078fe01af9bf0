"""Buffers that someone reads while a program that writes over them is started: the program gets a copy."""

from __future__ import annotations

import threading

import pytest
import torch

import torch_xla
import torch_xla.core.xla_model as xm
from torch_xla import _bindings
from torch_xla._core.execute import barrier
from torch_xla.debug import metrics

SIZE = 50_000  # too large for the host to compute


def copies() -> float:
    data = metrics.metric_data("HeldBufferCopies")
    return data[1] if data else 0


pytestmark = pytest.mark.usefixtures("idle")


def test_who_has_a_buffer_keeps_its_values(compiles) -> None:
    x = torch.linspace(0, 1, SIZE).to("xla")
    torch_xla.sync()
    with compiles() as compiled:
        for held, copied in ((True, 1), (False, 0), (True, 1)):
            before = copies()
            buffer = barrier.buffers([x])[0] if held else None
            first = x.cpu()[0].item()
            x.add_(2.5)
            torch_xla.sync()
            assert copies() - before == copied
            assert x.cpu()[0].item() == first + 2.5
            if buffer is not None:
                assert not buffer.is_deleted() and float(buffer[0]) == first
    assert compiled.value <= 1  # none where another test has the same graph


def test_a_part_of_a_pack_keeps_it() -> None:
    state = [torch.full((8,), float(i), device="xla") for i in range(6)]
    for _ in range(3):  # the first fills them, the second makes the pack
        for x in state:
            x.mul_(1.0).add_(2.5)
        torch_xla.sync()
    locations = [_bindings.location_of(x) for x in state]
    assert all(start >= 0 for _, start in locations)
    before = copies()
    for x in state:
        x.mul_(1.0).add_(2.5)
    torch_xla.sync()
    assert copies() - before == 1
    for i, (x, (buffer, start)) in enumerate(zip(state, locations, strict=True)):
        assert float(buffer[start]) == i + 7.5
        assert x.tolist() == [i + 10.0] * 8


def test_a_buffer_that_was_given_away() -> None:
    x = torch.linspace(0, 1, SIZE).to("xla")
    torch_xla.sync()
    buffer = barrier.buffers([x])[0]
    assert _bindings.set_buffer_donor(x, True)
    y = x * 3
    torch_xla.sync()
    assert y[-1].item() == 3
    assert float(buffer[-1]) == 1
    assert _bindings.is_lost(x)


def test_asynchronous_step_closures_read_weights() -> None:
    model = torch.nn.Linear(256, 256).to("xla")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 256).to("xla")
    seen: list[torch.Tensor] = []
    for _ in range(100):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        xm.add_step_closure(lambda: seen.append(model.weight.cpu()), run_async=True)
        torch_xla.sync()
    xm.wait_device_ops()
    assert len(seen) == 100
    assert torch.equal(seen[-1], model.weight.cpu())


@pytest.mark.costs("a thousand steps")
def test_threads_read_weights_for_a_thousand_steps() -> None:
    """What is read is a value that the weight had: never one of another step, or of two."""
    large = [torch.zeros(SIZE, device="xla") for _ in range(2)]
    small = [torch.zeros(50, device="xla") for _ in range(6)]
    weights = large + small
    over = threading.Event()
    failures: list[str] = []
    reads = [0] * 4

    def read(number: int) -> None:
        latest = [0.0] * len(weights)
        try:
            while not over.is_set():
                which = (number + reads[number]) % len(weights)
                values = weights[which].cpu()
                low, high = values.min().item(), values.max().item()
                if low != high or low < latest[which]:
                    failures.append(f"weight {which}: {low} to {high} after {latest[which]}")
                    return
                latest[which] = low
                reads[number] += 1
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=read, args=(i,)) for i in range(len(reads))]
    for thread in threads:
        thread.start()
    try:
        for _ in range(1000):
            for weight in weights:
                weight.add_(1.0)
            torch_xla.sync()
            if failures:
                break
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert min(reads) > 0
    assert all(weight.cpu().eq(1000).all() for weight in weights)
