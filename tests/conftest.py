"""Four CPU devices, hypothesis profiles, and fixtures that pin how often something happens.

The environment must be set before anything imports torch_xla. A run that sets PJRT_DEVICE itself keeps its choice, so
the same tests run on a GPU.
"""

from __future__ import annotations

import os
import resource
import sys

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "4")
# What PyTorch's CPU kernels compute says nothing of its lowering: tests compile, unless they are marked. With
# XLA_COMPILE_WHEN_HOT=1, as `make test-hot` has it, new graphs are not: values are compared, counts are not.
os.environ.setdefault("XLA_COMPILE_WHEN_HOT", "0")
os.environ.setdefault("XLA_VERIFY_GRAPHS", str(1 - int(os.environ["XLA_COMPILE_WHEN_HOT"])))
os.environ["XLA_HOST_COMPUTE"] = os.environ["XLA_COMPILE_WHEN_HOT"]
# Most of a test's time is compiling programs that run once, four times as long with LLVM's optimisations and XLA's
# emitters of fused loops; the passes over HLO, which are what a lowering meets, stay. `XLA_FLAGS= make test` compiles
# as in use, and so do the sweeps, and tests marked `optimized("reason")`.
if os.environ["PJRT_DEVICE"] == "CPU":
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false")
# Tests of single rules start JAX before there is an xla tensor; they must find as many devices.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", os.environ["CPU_NUM_DEVICES"])

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import plugin
import pytest
import torch
import turns
from hypothesis import HealthCheck, settings

WHEN_HOT = os.environ["XLA_COMPILE_WHEN_HOT"] == "1"
_IN_USE = {"xla_backend_optimization_level": 3, "xla_cpu_use_fusion_emitters": True}

settings.register_profile(
    "default", max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("fuzz", settings.get_profile("default"), max_examples=10_000, derandomize=False)
settings.load_profile("default")

torch.manual_seed(0)  # for the numbers that test modules draw when they are collected


_over: list[tuple[float, str]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-limit", type=float, help="seconds that a test may take that is not marked slow")


def _cpu_seconds() -> float:
    """Of this process and those it waited for, which depends less on what else runs than the time on the clock."""
    own = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in own)


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("own_client")
    if marker is not None and os.environ["PJRT_DEVICE"] == plugin.NAME:
        pytest.skip(marker.args[0])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    began = _cpu_seconds()
    try:
        return (yield)
    finally:
        if item.get_closest_marker("slow") is None:
            item.user_properties.append(("cpu", _cpu_seconds() - began))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        _over.extend((seconds, report.nodeid) for _, seconds in report.user_properties if isinstance(seconds, float))


def pytest_sessionfinish(session: pytest.Session) -> None:
    limit = session.config.getoption("cpu_limit")
    _over[:] = sorted((found for found in _over if limit and found[0] > limit), reverse=True)
    if _over and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for seconds, name in _over:
        terminalreporter.write_line(f"{seconds:.1f} s of CPU, make it cheaper or mark it slow: {name}", red=True)


def pytest_configure() -> None:
    turns.turn()  # before there are other processes, which get it from the environment


def pytest_report_header() -> str:
    return f"TEST_TURN={turns.turn()}"


@pytest.fixture(autouse=True)
def same_start() -> None:
    """The same random numbers and the same current device in every run of a test, whichever ran before."""
    torch.manual_seed(0)
    if "torch_xla" in sys.modules:  # importing it is part of what some tests look at
        sys.modules["torch_xla"]._bindings.set_current_device(0)


@pytest.fixture(autouse=True)
def in_use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test marked `optimized("reason")` is compiled as in use."""
    marker = request.node.get_closest_marker("optimized")
    if marker is None or os.environ["PJRT_DEVICE"] != "CPU":
        yield
        return
    (reason,) = marker.args
    assert isinstance(reason, str)
    from torch_xla._core.compile import cache, compiler

    quick = compiler._options_for
    monkeypatch.setattr(compiler, "_options_for", lambda device: {**quick(device), **_IN_USE})
    cache.clear()
    yield
    cache.clear()


@contextmanager
def following(on: bool, **limits: int) -> Iterator[None]:
    """Loops without barriers are cut inside the block, or not; limits such as ``first_look`` are for short loops."""
    import torch_xla
    from torch_xla import _bindings

    torch_xla.sync()
    was = _bindings.follows_streams()
    _bindings.follow_streams(on, **limits)
    yield
    _bindings.follow_streams(was)


@pytest.fixture
def no_auto_barrier() -> Iterator[None]:
    """For a test that needs one graph of operators that repeat."""
    with following(False):
        yield


@pytest.fixture
def auto_barrier() -> Iterator[None]:
    """Loops without barriers are cut, whatever the environment says."""
    with following(True):
        yield


def _take_host_computed() -> int:
    """How many graphs PyTorch's CPU kernels computed since the last call."""
    metrics = sys.modules.get("torch_xla._metrics")
    found = (metrics.counter("HostCompute") or 0) if metrics is not None else 0
    if found and metrics is not None:
        metrics.clear_counters()
    return found


@pytest.fixture(autouse=True)
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every graph of a test is compiled, those behind reads too, unless it is marked `host_compute("reason")`."""
    marker = request.node.get_closest_marker("host_compute")
    if marker is not None:
        (reason,) = marker.args
        assert isinstance(reason, str)
        monkeypatch.setenv("XLA_HOST_COMPUTE", "1")
    yield
    found = _take_host_computed()
    assert marker is not None or not found or WHEN_HOT, (
        f"{found} graph(s) were computed by PyTorch's CPU kernels, which shows nothing of their lowering; "
        'keep XLA_HOST_COMPUTE=0, or mark the test host_compute("reason")'
    )


@pytest.fixture
def when_hot(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs run operator by operator until they repeat; none has run yet. For tests marked `host_compute`."""
    if os.environ["PJRT_DEVICE"] == plugin.NAME:
        pytest.skip("on a plugin new graphs are compiled")
    import torch_xla
    from torch_xla._core import hotness
    from torch_xla._core.compile import cache
    from torch_xla._core.report import retrace

    torch_xla.sync()
    for known in (cache, hotness, retrace):
        known.clear()
    monkeypatch.setenv("XLA_COMPILE_WHEN_HOT", "1")
    monkeypatch.setenv("XLA_VERIFY_GRAPHS", "0")
    yield
    hotness.clear()


@dataclass
class Count:
    """How often a counter went up inside a block; read it after the block."""

    value: int = 0


Counting = Callable[..., AbstractContextManager[Count]]


@pytest.fixture
def counted() -> Counting:
    """`with counted("CachedCompile", 3):` fails unless the counter rises by 3; without a number it only counts."""
    import torch_xla.debug.metrics as met

    @contextmanager
    def counting(name: str, expected: int | None = None) -> Iterator[Count]:
        count = Count()
        before = met.counter_value(name) or 0
        yield count
        count.value = (met.counter_value(name) or 0) - before
        if expected is not None and not WHEN_HOT:
            assert count.value == expected, f"{name} rose by {count.value}, expected {expected}"

    return counting


@pytest.fixture
def compiles(counted: Counting) -> Counting:
    """`with compiles(1):` fails unless exactly one graph is compiled in the block; without a number it only counts."""

    @contextmanager
    def counting(expected: int | None = None) -> Iterator[Count]:
        with counted("UncachedCompile", expected) as count:
            yield count

    return counting
