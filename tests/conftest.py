"""Four CPU devices, hypothesis profiles, and fixtures that pin how often something happens.

The environment must be set before anything imports torch_xla. A run that sets PJRT_DEVICE itself keeps its choice, so
the same tests run on a GPU.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import re
import resource
import signal
import sys
import traceback
from importlib.metadata import version

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "4")
# Tests of single rules start JAX before there is an xla tensor; they must find as many devices.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", os.environ["CPU_NUM_DEVICES"])

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

import plugin
import pytest
import rotation
import torch
from hypothesis import HealthCheck, settings

# Most of a test's time is compiling programs that run once, four times as long with LLVM's optimisations and XLA's
# emitters of fused loops; the passes over HLO, which are what a lowering meets, stay. `XLA_FLAGS= make test` compiles
# as in use, and so do the sweeps, and tests marked `optimized("reason")`. An unknown flag ends the process.
_EMITTERS = {"xla_cpu_use_fusion_emitters": True} if version("jaxlib") < "0.11" else {}  # later ones always use them
IN_USE = {"xla_backend_optimization_level": 3, **_EMITTERS}
if os.environ["PJRT_DEVICE"] == "CPU":
    os.environ.setdefault("XLA_FLAGS", " ".join(f"--{name}=0" for name in IN_USE))
# What compiles every graph; without these variables a new one runs operator by operator, as users have it.
COMPILED = {"XLA_HOST_COMPUTE": "never", "XLA_VERIFY_GRAPHS": "1"}
# Of lowering and compiling: operator by operator they would compare PyTorch's CPU kernels with themselves.
OF_COMPILING = ("ops", "opdb", "lower", "compile", "cut")
# Of processes that start, compile each for itself, and wait for each other.
JOBS = ("job", "distributed", "spmd")
WAITING = (*JOBS, "docs")
EXPENSIVE = ("callers", "workloads")
# What many processes of jobs import beside what all do: once, in the one that they are forked from.
FORKED = (
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.optim",
)
MISSING_DEVICE = re.compile(r"xla:[1-3], (available are xla:0 to xla:[0-2]|expected one of the [1-3] devices)\b")

settings.register_profile(
    "default", max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("fuzz", settings.get_profile("default"), max_examples=10_000, derandomize=False)
settings.load_profile("default")


_costs: list[tuple[float, str, str]] = []  # seconds, test, why it may take them
_files: set[Path] = set()  # of which this process has begun the tests


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-limit", type=float, help="seconds that a test may take that is not marked slow or costs")
    own = os.environ.get("TEST_WAY")  # of a run that this one is in
    choices = ["compiled", "default"]
    parser.addoption("--way", choices=choices, default=own, help="how tests run that may either way, not in turns")


def _cpu_seconds() -> float:
    """Of this process and those it started, which depends less on what else runs than the time on the clock."""
    own = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in own) + _cpu_seconds_of_children(os.getpid())


def _cpu_seconds_of_children(process: int) -> float:
    """Of those that are still there, as what forks others is, and of what they waited for."""
    seconds = 0.0
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # a thread, or a process, that has ended
            for child in map(int, task.read_text().split()):
                times = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[11:15]
                seconds += sum(map(int, times)) / os.sysconf("SC_CLK_TCK") + _cpu_seconds_of_children(child)
    return seconds


def _variables(item: pytest.Item) -> dict[str, str]:
    """Those that say how a test's graphs run.

    By its marker; compiled where it counts that, or is of compiling; and of the other files a quarter, in turns.
    """
    for marker in item.iter_markers():  # the closest first
        if marker.name in ("compiled", "by_default"):
            assert [type(reason) for reason in marker.args] == [str]
            if marker.name == "by_default":
                return {}
            return COMPILED | ({} if marker.kwargs.get("reads", True) else {"XLA_HOST_COMPUTE": "reads"})
    file = os.path.relpath(item.path, os.path.dirname(__file__))
    if "compiles" in getattr(item, "fixturenames", ()) or file.split(os.sep)[0] in OF_COMPILING:
        return COMPILED
    way = item.config.getoption("way")
    return COMPILED if (way == "compiled" if way else rotation.is_next(f"compiled {file}", 4)) else {}


@pytest.hookimpl(tryfirst=True)  # before fixtures of modules start anything
def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("own_client")
    if marker is not None and os.environ["PJRT_DEVICE"] == plugin.NAME:
        pytest.skip(marker.args[0])
    for name in COMPILED:
        os.environ.pop(name, None)
    os.environ.update(_variables(item))
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()  # its limit counts the models of all tests whose class is one of torch's
    if item.path not in _files:
        _files.add(item.path)
        gc.collect()
        gc.freeze()
        if item.path.parent.name in JOBS:
            from torch_xla._core.job import launcher

            multiprocessing.set_forkserver_preload([launcher._PRELOADED, *FORKED])
            forkserver.ensure_running()
            multiprocessing.set_forkserver_preload([])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if item.get_closest_marker("slow") or not item.config.getoption("cpu_limit"):
        return (yield)
    began = _cpu_seconds()
    try:
        return (yield)
    finally:
        marker = item.get_closest_marker("costs")
        item.user_properties.append(("cpu", (_cpu_seconds() - began, marker.args[0] if marker else "")))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Iterator[object]:
    """A test is skipped that fails for want of devices, of which a GPU's process may have one and CPUs' have four."""
    try:
        return (yield)
    except Exception as error:
        said = "".join(traceback.format_exception(error))  # with what led to it
        if MISSING_DEVICE.search(said) and sys.modules["torch_xla"].device_count() < 4:
            pytest.skip("needs several devices")
        raise


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        _costs.extend((cost[0], report.nodeid, cost[1]) for name, cost in report.user_properties if name == "cpu")


def pytest_sessionfinish(session: pytest.Session) -> None:
    limit = session.config.getoption("cpu_limit")
    _costs[:] = sorted((actual for actual in _costs if actual[0] > limit), reverse=True)
    if any(not reason for _, _, reason in _costs) and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for seconds, name, reason in _costs:
        told = reason or 'make it cheaper or mark it costs("reason")'
        terminalreporter.write_line(f"{seconds:.1f} s of CPU, {told}: {name}", red=not reason)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of files that wait for processes comes one after two that compute, so that workers seldom wait at one time.

    Workers take files, so those with long tests, or many, come first.
    """
    counts = Counter(item.path for item in items)
    most = sorted(counts, key=lambda path: (path.parent.name not in EXPENSIVE, -counts[path]))
    waiting = [path for path in most if path.parent.name in WAITING]
    computing = iter([path for path in most if path.parent.name not in WAITING])
    order: list[Path] = []
    for path in waiting:
        order += [path, *itertools.islice(computing, 2)]
    place = {path: number for number, path in enumerate([*order, *computing])}
    items.sort(key=lambda item: place[item.path])


def pytest_configure(config: pytest.Config) -> None:
    # What is imported stays, and so does most of what tests leave. Where a search for garbage looks at all of that, it
    # takes a second, and a few hundred tests ask for one.
    gc.disable()
    rotation.turn()  # before there are other processes, which get it from the environment
    if config.getoption("way"):
        os.environ["TEST_WAY"] = config.getoption("way")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # `nohup … &` ignores it, here and in what is started


def pytest_collectstart(collector: pytest.Collector) -> None:
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)  # the numbers that a module draws do not depend on which others are collected


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_report_header() -> str:
    return f"TEST_TURN={rotation.turn()}"


@pytest.fixture(autouse=True)
def same_start() -> None:
    """The same random numbers, current device and graphs known in every run of a test, whichever ran before."""
    torch.manual_seed(0)
    if "torch_xla._core.execute.hotness" in sys.modules:
        sys.modules["torch_xla._core.execute.hotness"].clear()
    if "torch_xla" in sys.modules:  # importing it is part of what some tests look at
        sys.modules["torch_xla"]._bindings.set_current_device(0)


@pytest.fixture(autouse=True)
def in_use(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test marked `optimized("reason")` is compiled as in use."""
    marker = request.node.get_closest_marker("optimized")
    if marker is None or os.environ["PJRT_DEVICE"] != "CPU":
        yield
        return
    assert [type(reason) for reason in marker.args] == [str]
    from torch_xla._core.compile import cache, compiler

    quick = compiler._options_for
    monkeypatch.setattr(compiler, "_options_for", lambda device: {**quick(device), **IN_USE})
    cache.clear()
    yield
    cache.clear()


@contextmanager
def following(on: bool, **limits: int) -> Iterator[None]:
    """Loops without barriers are cut inside the block, or not; limits such as ``first_look`` are for short loops."""
    import torch_xla
    from torch_xla import _bindings

    torch_xla.sync()
    was = _bindings.traces_calls()
    _bindings.trace_calls(on, **limits)
    yield
    _bindings.trace_calls(was)


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


@pytest.fixture
def all_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advice is logged in full."""
    monkeypatch.setenv("XLA_NOTICES", "all")


@pytest.fixture
def short_loops() -> Iterator[None]:
    """Loops without barriers are cut after a few times fewer steps than in use; none was seen yet."""
    import torch_xla
    from torch_xla._core.execute import auto_barrier

    with following(True, first_look=100, least_segment=24):
        auto_barrier.forget()
        yield
    torch_xla.sync()


def _take_uncompiled() -> int:
    """How many graphs ran without a program since the last call."""
    metrics = sys.modules.get("torch_xla._metrics")
    if metrics is None:
        return 0
    result = sum(metrics.counter(name) or 0 for name in ("HostCompute", "UncompiledRun"))
    if result:
        metrics.clear_counters()
    return result


@pytest.fixture(autouse=True)
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where every graph is to be compiled, a test fails that had one run otherwise."""
    yield
    result = _take_uncompiled()
    assert not result or _variables(request.node) != COMPILED, (
        f"{result} graph(s) were computed by PyTorch's CPU kernels, which shows nothing of their lowering; "
        'compile them, or mark the test by_default("reason")'
    )


@pytest.fixture
def idle() -> None:
    """Nothing is pending or runs, and nothing is held that a test left behind."""
    import torch_xla

    gc.collect()
    torch_xla.sync(wait=True)


@pytest.fixture
def nothing_compiled() -> None:
    """Nothing is pending, and no graph has a program."""
    import torch_xla
    from torch_xla._core.compile import cache

    torch_xla.sync()
    cache.clear()


@pytest.fixture
def when_hot() -> Iterator[None]:
    """Graphs run operator by operator until they repeat; none has run yet. For tests marked `by_default`."""
    if os.environ["PJRT_DEVICE"] == plugin.NAME:
        pytest.skip("on a plugin new graphs are compiled")
    import torch_xla
    from torch_xla._core.compile import cache
    from torch_xla._core.execute import hotness
    from torch_xla._core.report import recompiles

    torch_xla.sync()
    for known in (cache, hotness, recompiles):
        known.clear()
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
        if expected is not None:
            assert count.value == expected, f"{name} rose by {count.value}, expected {expected}"

    return counting


@pytest.fixture
def compiles(counted: Counting) -> Counting:
    """`with compiles(1):` fails unless exactly one graph is compiled in the block; without a number it only counts.

    A test that has it compiles every graph, unless it is marked otherwise.
    """

    @contextmanager
    def counting(expected: int | None = None) -> Iterator[Count]:
        with counted("UncachedCompile", expected) as count:
            yield count

    return counting
