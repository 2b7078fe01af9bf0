"""Who holds memory, and what is said when there is too little."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Iterator
from contextlib import nullcontext

import jax
import pytest
import torch
from probes import failed, setting

import torch_xla
from torch_xla import _bindings, _config
from torch_xla._core.device import memory_stats, transfer
from torch_xla._core.execute import executor
from torch_xla.debug import memory as public


@pytest.fixture
def limited() -> Iterator[torch.device]:
    """A device with 8 MiB beside what is alive there: little, since other tests use the first ones."""
    gc.collect()  # caught errors of other tests may hold tensors, and what goes in mid-test would be room
    torch_xla.sync()
    held = sum(kind.nbytes for kind in memory_stats.live_tensors(3))
    with setting(_config.XLA_MEMORY_LIMIT_MB, held // 2**20 + 8):
        yield torch.device("xla", 3)


def here(kinds: list[public.LiveTensors], shape: tuple[int, ...]) -> public.LiveTensors:
    (kind,) = [kind for kind in kinds if kind.shape == shape]
    return kind


def test_live_tensors_by_the_line_that_made_them() -> None:
    def made() -> torch.Tensor:
        return torch.ones(77, 3).to("xla")

    kept = [made() for _ in range(4)]
    torch_xla.sync()
    kind = here(public.live_tensors(), (77, 3))
    assert (kind.count, kind.nbytes, kind.dtype) == (4, 4 * 77 * 3 * 4, torch.float32)
    assert kind.line is not None and kind.line.startswith(__file__) and kind.line.endswith("in made")
    assert str(kind) == f"3.6 KiB: float32[77, 3] × 4, made at {kind.line}"
    assert public.live_tensors(torch.device("xla", 0)) == public.live_tensors(0) == public.live_tensors("xla:0")
    # What is pending holds no memory yet, and what is dropped none any more.
    kept.append((kept[0] + 1)[:5] * 2)
    assert not [kind for kind in public.live_tensors() if kind.shape == (5, 3)]
    del kept
    assert not [kind for kind in public.live_tensors() if kind.shape == (77, 3)]


def test_a_graph_over_the_limit_raises_once(limited: torch.device) -> None:
    x = torch.ones(1024, 1024).to(limited)  # 4 MiB
    y = torch.cat([x.sin(), x.cos()])  # 8 MiB, and what it is made of
    z = torch.ones(3).to(limited) + 1
    with pytest.raises(torch.OutOfMemoryError) as info:
        torch_xla.sync()
    text = str(info.value)
    assert isinstance(info.value, RuntimeError)
    assert re.match(r"XLA out of memory. Tried to allocate \d+\.\d\d MiB. \[memory\] graph ", text)
    assert "for results beside" in text and "XLA_MEMORY_LIMIT_MB=" in text
    assert f"4.0 MiB: float32[1024, 1024], made at {__file__}:" in text
    assert f"8.0 MiB: float32[2048, 1024] of aten.cat.default, at {__file__}:" in text
    assert "what to try:" in text
    assert not _bindings.has_pending(3) and z.tolist() == [2, 2, 2]
    torch_xla.sync()
    with pytest.raises(RuntimeError, match="make it again"):
        y.cpu()
    # With room for it, the same graph runs.
    with setting(_config.XLA_MEMORY_LIMIT_MB, 0):
        y = torch.cat([x.sin(), x.cos()])
        torch_xla.sync()
        torch.testing.assert_close(y.cpu(), torch.cat([torch.ones(1024, 1024).sin(), torch.ones(1024, 1024).cos()]))


def test_a_small_graph_within_the_limit_runs(limited: torch.device) -> None:
    x = torch.ones(256, 1024).to(limited)
    y = x.sin()
    torch_xla.sync()
    torch.testing.assert_close(y.cpu(), torch.ones(256, 1024).sin())


@pytest.mark.compiled("a program does not fit")
def test_a_device_that_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch_xla._core.execute import executor

    x = torch.ones(31, 7).to("xla").requires_grad_()
    y = x * 2

    def fail(*_: object) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1024 bytes.\nlong details")

    with monkeypatch.context() as patch:
        patch.setattr(executor, "run", fail)
        told = r"^XLA out of memory\. Tried to allocate 1.00 KiB\. \[memory\] graph .* does not fit"
        with pytest.raises(torch.OutOfMemoryError, match=told) as info:
            torch_xla.sync()
    assert "float32[31, 7] of aten.mul" in str(info.value) and "long details" not in str(info.value)
    assert (x * 3).sum().item() == 31 * 7 * 3
    del y


def test_a_program_that_runs_out_after_its_start() -> None:
    kept = torch.ones(29, 7).to("xla:1")

    run = failed("INTERNAL: Error dispatching computation: Out of memory allocating 1024 bytes.", 1)

    def wait() -> None:
        torch_xla.sync(wait=True)
        _bindings.in_flight(1).add_program(run)
        executor.wait(1)

    for find_out in (lambda: transfer.download((run, -1), (2,), torch.float32), wait):
        with pytest.raises(torch.OutOfMemoryError, match=r"\[memory\] a graph that was started did not fit") as info:
            find_out()
        assert "allocating 1024 bytes, on xla:1\n" in str(info.value) and "float32[29, 7], made at" in str(info.value)
    assert (kept + 1).sum().item() == 2 * 29 * 7


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        ("Out of memory allocating 1024 bytes.", "1.00 KiB"),
        ("Out of memory while trying to allocate 512.50GiB with allocator GPU_0_bfc on device 0.", "512.50 GiB"),
        ("Out of memory while trying to allocate 3.25MiB", "3.25 MiB"),
        ("Attempting to allocate 12.25G. That was not possible. There are 3.50G free.", "12.25 GiB"),
    ],
)
def test_what_was_asked_for_is_in_pytorchs_words(said: str, asked: str) -> None:
    explained = memory_stats.explain_late(RuntimeError(f"RESOURCE_EXHAUSTED: {said}"), 0)
    assert str(explained).startswith(f"XLA out of memory. Tried to allocate {asked}. ")


def test_values_that_only_a_pending_graph_holds_count(limited: torch.device) -> None:
    kept = torch.ones(1024, 1024).to(limited)
    for margin, outcome in ((-1, pytest.raises(torch.OutOfMemoryError)), (1, nullcontext())):
        x = torch.ones(1024, 1024).to(limited)
        torch_xla.sync()
        y = x.reshape(2, -1).tanh().exp()[:, ::2] + 1
        del x  # 4 MiB, which the graph still needs
        held = sum(kind.nbytes for kind in memory_stats.live_tensors(3))
        needed = held + (4 << 20) + y.nbytes
        with setting(_config.XLA_MEMORY_LIMIT_MB, (needed >> 20) + margin), outcome:
            torch_xla.sync()
    assert y.shape == (2, 2**18) and kept.shape == (1024, 1024)


def test_what_is_dropped_is_given_back_at_once() -> None:
    def bytes_alive() -> int:
        return sum(array.nbytes for array in jax.live_arrays())

    gc.collect()
    before = bytes_alive()
    for _ in range(2):
        x = torch.ones(1000).to("xla")
        assert bytes_alive() == before + 4000
        del x
        assert bytes_alive() == before
    thread = threading.Thread(target=lambda: torch.ones(1000).to("xla"))
    thread.start()
    thread.join()
    assert bytes_alive() == before


def test_a_tensor_that_is_filled_and_used_at_once_has_one_buffer() -> None:
    x = torch.ones(8, 123).to("xla")
    for _ in range(2):
        filled = torch.zeros(123, 77, device="xla")
        y = x @ filled
        torch_xla.sync()
    assert y.sum() == 0
    del filled
    assert not [array for array in jax.live_arrays() if array.shape == (123, 77)]
