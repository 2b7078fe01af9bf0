"""Situations in which a lazy device can hang, crash or lose data; those that may end a process run in their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from probes import python, start
from torch.utils.data import DataLoader, TensorDataset

import torch_xla
from torch_xla import _bindings

PRELUDE = "import torch, torch_xla\n"


def script(code: str, check: bool = True, imported: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs a program that has one device."""
    return python("-c", PRELUDE + code, devices=1, check=check, imported=imported)


def test_the_first_backward_of_the_process_may_be_on_cpu_or_xla() -> None:
    done = script("""
a = torch.ones(3, requires_grad=True); (a * a).sum().backward()
b = torch.ones(3, device='xla', requires_grad=True); (b * b).sum().backward()
print(b.grad.tolist())
""")
    assert done.stdout.strip() == "[2.0, 2.0, 2.0]"


@pytest.mark.costs("a process that imports all anew")
def test_counting_devices_for_autograd_starts_no_client() -> None:
    done = script(
        """
import sys, threading
a = torch.ones(3, requires_grad=True); (a * a).sum().backward()
assert 'jax' not in sys.modules
print('ok')
""",
        imported=False,
    )
    assert done.stdout.strip() == "ok", done.stderr


def test_exit_with_work_in_flight_is_clean() -> None:
    done = script("""
import threading
x = torch.randn(600, 600, device='xla', requires_grad=True)
for _ in range(30):
    y = (x @ x).sum(); y.backward(); torch_xla.sync()
print('end')
""")
    assert done.stdout.strip() == "end"
    assert "terminate" not in done.stderr


@pytest.mark.compiled("it asks which programs run")
@pytest.mark.own_client("JAX warns of a plugin that it does not know")
def test_exit_waits_for_what_was_started() -> None:
    done = script("""
import atexit
from torch_xla import _bindings
atexit.register(lambda: print(_bindings.in_flight(0).programs))  # called last
x = torch.randn(600, 600, device='xla')
for _ in range(3):
    x = x @ x; torch_xla.sync()
print(_bindings.in_flight(0).programs > 0)
""")
    assert (done.stdout.split(), done.stderr) == (["True", "0"], "")


def test_exit_with_pending_work_is_clean() -> None:
    done = script("x = torch.randn(3, device='xla').to('xla') + 1\nprint('end')")
    assert (done.stdout.strip(), done.stderr) == ("end", "")


def test_workers_forked_beside_the_client_neither_hang_nor_warn() -> None:
    done = script("""
from torch.utils.data import DataLoader, TensorDataset
(torch.ones(3).to('xla') + 1).cpu()
for epoch in range(2):
    for (x,) in DataLoader(TensorDataset(torch.arange(64.0)), batch_size=8, num_workers=2):
        (x.to('xla') + 1).sum().item()
print('end')
""")
    assert done.stdout.strip() == "end"
    assert "fork" not in done.stderr


def test_a_forked_child_that_uses_the_device_is_told_why_not() -> None:
    done = script("""
import os
(torch.ones(3).to('xla') + 1).cpu()
pid = os.fork()
if pid == 0:
    try:
        torch.ones(3).to('xla')
    except RuntimeError as error:
        os._exit(7 if 'forked' in str(error) else 8)
    os._exit(9)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
""")
    assert done.stdout.strip() == "7", done.stderr


@pytest.mark.compiled("it is about compiling")
@pytest.mark.costs("a program that takes a second to compile")
def test_an_interrupt_while_compiling_leaves_a_usable_process() -> None:
    done = script("""
import os, signal, threading
os.environ['XLA_FLAGS'] = ''  # compiled as in use, which takes a second
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts with it ignored
torch_xla.experimental.auto_barrier(False)
x = torch.randn(8, 8).to('xla')
y = x
for i in range(40):
    y = torch.tanh(y @ x) + torch.sin(y) * float(i)
interrupted = threading.Event()
def press():
    # More than once: Python drops an interrupt that arrives in a callback of its garbage collector.
    while not interrupted.wait(0.3):
        os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=press, daemon=True).start()
try:
    torch_xla.sync()
    print('not interrupted')
except KeyboardInterrupt:
    interrupted.set()
    print('interrupted')
print(tuple(y.cpu().shape), (x + 1).cpu().shape == (8, 8))
""")
    assert done.stdout.splitlines()[-1] == "(8, 8) True"
    assert done.stdout.splitlines()[0] == "interrupted"


@pytest.mark.compiled("it is about compiling")
@pytest.mark.costs("four processes, which compile")
def test_a_process_killed_while_compiling_leaves_no_broken_cache(tmp_path: object) -> None:
    code = f"""
import torch_xla.runtime as xr
xr.initialize_cache({str(tmp_path)!r})
x = torch.arange(64.).reshape(8, 8).to('xla') / 64
for i in range(60):
    x = torch.tanh(x @ x) + torch.sin(x)
print('start', flush=True)
torch_xla.sync()
print(round(x.sum().item(), 4))
"""
    for wait in (0.1, 0.5):
        process = start("-c", PRELUDE + code, devices=1, imported=True)
        assert process.stdout is not None and process.stdout.readline() == "start\n"
        time.sleep(wait)
        process.kill()
        process.communicate(timeout=60)
    first, second = (script(code) for _ in range(2))
    assert first.stdout == second.stdout


@pytest.mark.compiled("it is about kept programs")
@pytest.mark.costs("three processes")
def test_a_damaged_cache_file_is_compiled_anew(tmp_path: object) -> None:
    code = f"""
import torch_xla.runtime as xr, torch_xla.debug.metrics as met
xr.initialize_cache({str(tmp_path)!r})
x = (torch.arange(8.).to('xla') * 3).sum()
torch_xla.sync()
print(x.item(), met.counter_value('UncachedCompile'), met.counter_value('PersistentCacheHit'))
"""
    assert script(code).stdout.strip() == "84.0 1 None"
    assert script(code).stdout.strip() == "84.0 None 1"
    for file in os.scandir(str(tmp_path)):
        with open(file.path, "r+b") as content:
            content.seek(200)
            content.write(b"damage")
    assert script(code).stdout.strip() == "84.0 1 None"


def test_an_unknown_device_kind_lists_what_there_is() -> None:
    code = PRELUDE + "torch.ones(3).to('xla')"
    done = python("-c", code, devices=1, check=False, imported=True, PJRT_DEVICE="banana")
    assert done.returncode == 1
    assert "PJRT_DEVICE=banana" in done.stderr
    assert "available here: CPU" in done.stderr


def test_tensors_dropped_by_another_thread_during_barriers() -> None:
    stop = threading.Event()
    failures: list[BaseException] = []

    def churn() -> None:
        try:
            while not stop.is_set():
                kept = [torch.ones(4, device="xla") * i for i in range(20)]
                del kept
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        x = torch.zeros(4, device="xla")
        for _ in range(20):
            x = x + 1.0
            torch_xla.sync(wait=True)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures
    assert x.tolist() == [20.0] * 4


def test_a_barrier_never_meets_a_tensor_in_the_making() -> None:
    stop = threading.Event()

    def make() -> None:
        while not stop.is_set():
            torch.empty(8, device="xla")

    interval = sys.getswitchinterval()
    threads = [threading.Thread(target=make) for _ in range(2)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            assert _bindings.Cut.of_device(0).graph().num_outputs == 0, "nothing is to be computed for an empty tensor"
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()


def test_threads_record_and_read_at_once() -> None:
    results: dict[int, float] = {}

    def work(index: int) -> None:
        x = torch.full((8, 8), float(index), device="xla", requires_grad=True)
        for _ in range(5):
            loss = (x @ x).sum()
            (gradient,) = torch.autograd.grad(loss, x)
            results[index] = gradient.sum().item()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert results == {i: 2.0 * 8 * 64 * i for i in range(4)}


def test_backward_hooks_may_read_values() -> None:
    seen: list[float] = []
    x = torch.ones(3, device="xla", requires_grad=True)
    y = x * 2
    y.register_hook(lambda g: seen.append(g.sum().item()))
    y.sum().backward()
    assert seen == [3.0]


def test_loading_in_workers_keeps_order() -> None:
    loader = DataLoader(TensorDataset(torch.arange(32.0)), batch_size=4, num_workers=2)
    assert [x.to("xla").sum().item() for (x,) in loader] == [float(sum(range(i, i + 4))) for i in range(0, 32, 4)]


class TestFailures:
    """A graph that fails takes nothing else with it."""

    @pytest.fixture
    def broken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch_xla._core.compile import compiler

        def fail(*args: object) -> None:
            raise ValueError("no such instruction")

        monkeypatch.setattr(compiler, "compile_lowered", fail)

    @pytest.mark.compiled("the compiler fails")
    def test_a_failed_compile_gives_back_the_earlier_values(
        self, broken: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        x = torch.arange(3.0).to("xla")
        x.add_(41.5)
        new = x * 7.25
        with pytest.raises(RuntimeError, match=r"\[sync\] graph .* failed: no such instruction"):
            torch_xla.sync()
        monkeypatch.undo()
        assert x.tolist() == [0.0, 1.0, 2.0]
        with pytest.raises(RuntimeError, match="no such instruction"):
            new.cpu()
        with pytest.raises(RuntimeError, match="no such instruction"):
            new + 1
        assert (x + 1).tolist() == [1.0, 2.0, 3.0]

    @pytest.mark.own_client("an operator of the host fails at its line")
    def test_a_failing_host_operator_names_itself_and_keeps_values(self) -> None:
        with torch.library._scoped_library("trap", "DEF") as library:
            library.define("explode(Tensor x) -> Tensor")
            library.impl("explode", lambda x: torch.empty_like(x), "Meta")

            def explode(x: torch.Tensor) -> torch.Tensor:
                raise ValueError("boom")

            library.impl("explode", explode, "CPU")
            x = torch.arange(40000.0).to("xla")
            x.add_(torch.ops.trap.explode(x))
            with pytest.raises(RuntimeError, match="boom"):
                torch_xla.sync()
            assert x[:3].tolist() == [0.0, 1.0, 2.0]

    def test_an_operator_without_any_kernel_is_named(self) -> None:
        with torch.library._scoped_library("trap", "DEF") as library:
            library.define("nothing(Tensor x) -> Tensor")
            with pytest.raises(NotImplementedError, match=r"\[record trap::nothing\].*register one"):
                torch.ops.trap.nothing(torch.ones(3, device="xla"))
        assert (torch.ones(3, device="xla") + 1).tolist() == [2.0] * 3


@pytest.mark.parametrize("make", [lambda: torch.zeros(0, 3), lambda: torch.zeros(2, 0)])
def test_zero_size_tensors_run(make: Callable[[], torch.Tensor]) -> None:
    x = make()
    for op in (
        lambda t: t.roll(1, 0),
        lambda t: t.flip(0),
        lambda t: t + 1,
        lambda t: t.sum(),
        lambda t: t.repeat(2, 2),
    ):
        torch.testing.assert_close(op(x.to("xla")).cpu(), op(x))


def test_a_read_value_leaves_the_rest_pending(compiles: Callable[..., object]) -> None:
    x = torch.arange(40000.0).to("xla")
    y = x * 2.5
    z = y.sin()
    assert y[1].item() == 2.5
    assert _bindings.has_pending(0)
    torch_xla.sync()
    torch.testing.assert_close(z.cpu(), (torch.arange(40000.0) * 2.5).sin())


def test_clones_do_not_share_a_donated_buffer() -> None:
    x = torch.arange(1000.0).to("xla") + 0.5
    torch_xla.sync()
    y = x.clone()
    torch_xla.sync()
    for _ in range(3):
        x.add_(1.5)
        torch_xla.sync()
    assert y[0].item() == 0.5
    assert x[0].item() == 5.0


def test_signals_reach_the_program_between_barriers() -> None:
    got: list[int] = []
    old = signal.signal(signal.SIGUSR1, lambda number, frame: got.append(number))
    try:
        for _ in range(3):
            x = torch.ones(3, device="xla") * 2.5
            os.kill(os.getpid(), signal.SIGUSR1)
            torch_xla.sync()
            assert x.tolist() == [2.5] * 3
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert got == [signal.SIGUSR1] * 3
