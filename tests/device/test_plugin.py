"""A PJRT plugin of somebody else's: nothing of this process is in its programs, and they cannot call it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import plugin
import pytest
import torch
from conftest import Counting
from probes import here, python

import torch_xla
from torch_xla import _notices
from torch_xla._core.compile import cache
from torch_xla._core.device import client, placement, transfer
from torch_xla._core.execute import barrier, op_by_op
from torch_xla.core.xla_builder import call_jax
from torch_xla.experimental.fori_loop import while_loop
from torch_xla.ops import fallback

airy, erfcx = torch.special.airy_ai, torch.special.erfcx


@pytest.fixture
def no_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A device as that of a plugin without host callbacks."""

    def forget() -> None:
        torch_xla.sync()
        placement._of.cache_clear()
        cache.clear()
        _notices.forget("fallback")

    forget()
    monkeypatch.setattr(client, "is_own_cpu", lambda: False)
    monkeypatch.setattr(client, "has_callbacks", lambda: False)
    yield
    monkeypatch.undo()
    forget()


@pytest.mark.own_client("its programs can call the host")
def test_a_client_is_asked_by_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "is_own_cpu", lambda: False)
    asked: list[bool] = []

    def traced(x: jax.Array) -> jax.Array:
        asked.append(client.has_callbacks.__wrapped__())
        return x

    jax.jit(traced)(1.0)
    monkeypatch.setattr(jax, "pure_callback", None)
    asked.append(client.has_callbacks.__wrapped__())
    assert asked == [True, False]


@pytest.mark.usefixtures("no_calls")
def test_one_thread_at_a_time_views_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    viewers, copy = [], fallback.from_numpy

    def copied(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        viewers.append(array)
        time.sleep(1e-3)
        assert viewers.pop() is array and not viewers
        return copy(array, dtype)

    monkeypatch.setattr(fallback, "from_numpy", copied)
    location = barrier.buffers([torch.arange(3.0, device="xla")], wait=True)[0], -1
    assert all(ThreadPoolExecutor(8).map(lambda _: transfer.download(location, (3,), torch.float32)[2] == 2, range(32)))


@pytest.mark.usefixtures("no_calls", "all_told")
class TestWithoutCallbacks:
    """Sizes are those of no other test: what was recorded of a call before is not asked again."""

    def test_an_operator_without_a_lowering_cuts_the_graph(
        self, counted: Counting, compiles: Counting, capfd: pytest.CaptureFixture[str]
    ) -> None:
        x = torch.linspace(-1, 1, 1031).to("xla")
        with compiles(2), counted("aten::special_airy_ai", 3):
            for _ in range(3):
                y = airy(x * 2)
                line = here(-1)
                z = y + 1
                torch_xla.sync()
        assert torch.equal(y.cpu(), airy(x.cpu() * 2)) and torch.equal(z.cpu(), y.cpu() + 1)
        (told,) = [line for line in capfd.readouterr().err.splitlines() if "runs on the host" in line]
        assert told.startswith("torch_xla: aten::special_airy_ai runs on the host, between two programs: ")
        assert told.endswith(f"({line})")

    def test_gradients_and_writes(self, counted: Counting) -> None:
        def train(device: str) -> list[float]:
            w = torch.linspace(0.1, 2, 1033).to(device).requires_grad_()
            optimizer, losses = torch.optim.SGD([w], lr=0.1, momentum=0.9), []
            for _ in range(3):
                optimizer.zero_grad()
                noise = w.detach() * 0.5
                airy(noise, out=noise)
                noise[3:].mul_(2)
                x = w.reshape(1, -1).mul(1).T
                loss = (torch._segment_reduce(x, "sum", lengths=lengths.to(device), axis=0) * noise[:3].sum()).sum()
                loss.backward()
                optimizer.step()
                torch_xla.sync()
                losses.append(loss.detach())
            return [loss.item() for loss in losses]

        lengths = torch.tensor([33, 500, 500])
        expected = train("cpu")
        with counted("aten::segment_reduce", 3), counted("aten::_segment_reduce_backward", 3):
            assert train("xla") == pytest.approx(expected, rel=1e-5)

    def test_a_decomposition_that_ends_in_one_takes_its_graph_along(self, counted: Counting) -> None:
        x = torch.linspace(0.1, 1, 1039).to("xla")
        with counted("HostGraph", 3), counted("prims::erfcx", 3):
            for _ in range(3):
                x.add_(1)
                y = erfcx(x)
                torch_xla.sync()
        assert torch.equal(y.cpu(), erfcx(x.cpu())) and x[0].item() == pytest.approx(3.1)

    def test_a_function_that_calls_the_host(self) -> None:
        def plus(x: jax.Array) -> jax.Array:
            return jax.pure_callback(lambda a: np.asarray(a) + 1, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

        x = torch.ones(1049, device="xla")
        y = call_jax(plus, (x * 2,))
        assert torch.equal(y.cpu(), torch.full((1049,), 3.0))
        (_, z) = while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, airy(x)), (torch.zeros((), device="xla"), y))
        assert torch.equal(z.cpu(), airy(airy(airy(y.cpu()))))

    def test_where_the_host_cannot_either(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(op_by_op, "run", lambda *_: False)
        x = torch.ones(1051, device="xla") * 3
        y = erfcx(x)
        with pytest.raises(RuntimeError, match=r"\[run\] got prims::erfcx, which runs on the host .*\.cpu\(\)"):
            torch_xla.sync()
        del y
        assert x.sum().item() == 3 * 1051

    def test_an_interrupt_on_the_host(self) -> None:
        with torch.library._scoped_library("late_stop", "DEF") as library:
            library.define("stop(Tensor x) -> Tensor")
            library.impl("stop", torch.empty_like, "Meta")

            def stop(x: torch.Tensor) -> torch.Tensor:
                raise KeyboardInterrupt

            library.impl("stop", stop, "CPU")
            x = torch.ones(1061, device="xla") + 1
            with pytest.raises(KeyboardInterrupt):
                torch.ops.late_stop.stop(x)
        assert x.sum().item() == 2 * 1061


@pytest.mark.skipif(plugin.library() is None, reason=plugin.MISSING)
def test_a_plugin_trains() -> None:
    program = """
import torch, torch_xla
import torch_xla.debug.metrics as met
from torch_xla._core.device import client, placement

def train(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 3), torch.nn.Flatten(), torch.nn.Linear(288, 4)).to(device)
    x, optimizer, losses = torch.rand(64, 1, 8, 8).to(device), torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(3):
        optimizer.zero_grad()
        y = model(x)
        loss = (y.sort(0).values ** 2).mean() + torch.special.airy_ai(y.detach()).mean() * y.mean()
        loss = loss + torch.linalg.det(y[:4] + 3 * torch.eye(4, device=device)) * 1e-3
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()

torch.testing.assert_close(train("xla"), train("cpu"), rtol=1e-4, atol=1e-5)
assert not placement.of(0).on_host and not client.has_callbacks() and client.device_type() == "vendor"
assert met.counter_value("aten::special_airy_ai") == 3 and met.counter_value("UncachedCompile") > 0
"""
    done = python("-c", program, imported=True, **_environment(str(plugin.library())))
    assert done.stderr.count("aten::special_airy_ai runs on the host, between two programs") == 1


def _environment(library: str) -> dict[str, str]:
    named = {"PJRT_DEVICE": plugin.NAME, "PJRT_NAMES_AND_LIBRARY_PATHS": f"{plugin.NAME}:{library}"}
    return {**named, "XLA_HOST_COMPUTE": "never", "XLA_NOTICES": "all"}


def test_a_library_that_is_not_there() -> None:
    program = """
import torch, torch_xla
for _ in range(2):
    try:
        torch.ones(3, device="xla").tolist()
    except RuntimeError as error:
        print(error)
"""
    done = python("-c", program, imported=True, **_environment("/nowhere/libpjrt.so"))
    text = "[device] got PJRT_NAMES_AND_LIBRARY_PATHS=vendor:/nowhere/libpjrt.so, expected the path of a file that is "
    text += "there; correct it, or set PJRT_DEVICE to what is available here: CPU"
    assert [line for line in done.stdout.splitlines() if line.startswith("[")] == [text] * 2
