"""What many tests look at: cut graphs, how often something was timed, their own lines, and fresh interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import warm

import torch_xla
from torch_xla import _bindings, _config, _metrics
from torch_xla._core.compile import cache
from torch_xla._core.device import client
from torch_xla._core.execute import pipeline
from torch_xla._core.graph import graph

ROOT = Path(__file__).parents[1]
PACKAGE = Path(torch_xla.__file__).parents[1]  # another folder where a build of its own is tested


def python(
    *arguments: str | Path,
    devices: int | None = None,
    check: bool = True,
    cwd: Path | None = None,
    timeout: float = 120,
    imported: bool = False,
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """Runs an interpreter that imports the package that is tested.

    Args:
        *arguments: Those of the interpreter, such as a script, or "-c" and a program.
        devices: How many CPU devices it has; by default as many as the tests have.
        check: Whether it must succeed.
        cwd: The folder it runs in.
        timeout: Seconds.
        imported: Whether PyTorch, JAX and the package may be imported before the program and its variables are there,
            which is three seconds cheaper. Not where imports, addresses or hash seeds matter.
        **env: Further environment variables.
    """
    program = start(*arguments, devices=devices, cwd=cwd, imported=imported, **env)
    try:
        result = program.communicate(timeout=timeout)
    except BaseException:
        program.kill()
        program.communicate(timeout=timeout)
        raise
    assert program.returncode is not None
    done = subprocess.CompletedProcess(program.args, program.returncode, *result)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def start(
    *arguments: str | Path, devices: int | None = None, cwd: Path | None = None, imported: bool = False, **env: str
) -> warm.Program | subprocess.Popen[str]:
    """The same without waiting for it; its standard input is a pipe."""
    environment = {**os.environ, "PYTHONPATH": f"{PACKAGE}{os.pathsep}{ROOT / 'tests'}"}
    if devices is not None:
        environment |= {"CPU_NUM_DEVICES": str(devices), "JAX_NUM_CPU_DEVICES": str(devices)}
    environment |= env
    pipe = subprocess.PIPE
    command = [sys.executable, *map(str, arguments)]
    if imported:
        return warm.start([*map(str, arguments)], environment, cwd)
    return subprocess.Popen(command, cwd=cwd, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


@contextmanager
def setting(option: _config.Option[Any], value: Any) -> Iterator[None]:
    """A block in which an environment variable has a value.

    Args:
        option: Which.
        value: What; None where it is not to be set.
    """
    with mock.patch.dict(os.environ):
        option.set(value)
        yield


@contextmanager
def of_pytorch(name: str, value: Any) -> Iterator[None]:
    """A block in which a setting of PyTorch has a value, such as ``"default_dtype"``."""
    get, set_to = (getattr(torch, f"{what}_{name}") for what in ("get", "set"))
    before = get()
    set_to(value)
    try:
        yield
    finally:
        set_to(before)


def here(offset: int = 0) -> str:
    """The caller's line, or one so many lines from it, as the recorder writes it."""
    frame = sys._getframe(1)
    return f"{frame.f_code.co_filename}:{frame.f_lineno + offset} in {frame.f_code.co_name}"


def cut_of(*tensors: torch.Tensor) -> graph.Graph:
    """The graph of pending tensors, which stay pending."""
    return graph.describe(_bindings.Cut.of_tensors(list(tensors)).preview())


@dataclass
class Samples:
    """How often a metric was sampled inside a block; read it after the block."""

    value: int = 0


def _count(name: str) -> int:
    metric = _metrics.metric(name)
    return metric.count if metric is not None else 0


@contextmanager
def sampled(name: str, expected: int | None = None) -> Iterator[Samples]:
    """`with sampled("TransferToDeviceTime", 1):` fails unless the metric gets that many samples in the block."""
    samples = Samples()
    before = _count(name)
    yield samples
    samples.value = _count(name) - before
    if expected is not None:
        assert samples.value == expected, f"{name} was sampled {samples.value} times, expected {expected}"


def cuts() -> int:
    """How often a loop without barriers was cut."""
    return _metrics.counter("AutoBarrier") or 0


def spy_on_barriers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that gets the key of every graph from now on, whether known or new."""
    keys: list[str] = []
    latest: list[_bindings.Graph] = []
    monkeypatch.setattr(pipeline, "_is_observed", lambda: True)
    find = cache.find

    def spy(cut: _bindings.Graph) -> object:
        if not any(cut is seen for seen in latest):  # asked for again, once it was compared with others
            keys.append(cut.key)
        latest[:] = [cut]
        return find(cut)

    monkeypatch.setattr(cache, "find", spy)
    return keys


def failed(text: str, device: int = 0) -> Any:
    """A token or buffer of a run that failed."""

    class Failed:
        devices = staticmethod(lambda: {client.jax_device(device)})
        is_deleted = staticmethod(lambda: False)

        def block_until_ready(self) -> None:
            raise ValueError(text)

    return Failed()
