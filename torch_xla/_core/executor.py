"""Running: input buffers in, results attached, without waiting for the device."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from torch_xla import _bindings, _metrics, _timeline
from torch_xla._core import backend
from torch_xla._core.compiler import Executable
from torch_xla._core.dispatch import undisturbed

# Steps the host may be ahead of the device: enough to hide tracing, few enough to bound memory.
_AHEAD = 2

_in_flight: dict[int, deque[Any]] = {}


def run(executable: Executable, cut: _bindings.Graph) -> None:
    """Starts the program on the graph's inputs and gives its results to the tensors.

    Args:
        executable: The compiled graph.
        cut: The graph; empty afterwards.

    Raises:
        RuntimeError: The program could not be started, or a host callback in it failed.
    """
    device = cut.device
    queue = _in_flight.setdefault(device, deque())
    if len(queue) >= _AHEAD:
        _wait(device, _AHEAD - 1)
    try:
        stage = _metrics.stage("ExecuteTime")
        start = time.perf_counter()
        with undisturbed(), _timeline.span(stage):
            token = cut.execute(executable.program, _put, stage)
    except BaseException:  # an interrupt, say
        executable.renew()
        raise
    queue.append(token)
    _timeline.launched(device, cut.key, start, executable, token)


def _put(numbers: Any, device: int) -> Any:
    """The numbers of a graph on its device."""
    _metrics.count("DeviceDataCacheMiss")
    return backend.put(numbers, device)


def wait(device: int) -> None:
    """Returns when the device has finished all that was started.

    Raises:
        torch.OutOfMemoryError: A program did not fit into the device's memory.
    """
    if _in_flight.get(device):
        _wait(device, 0, _bindings.user_frame)


def _wait(device: int, left: int, line: Callable[[], str | None] | None = None) -> None:
    """Waits until so many runs are left in flight."""
    queue = _in_flight[device]
    start = time.perf_counter()
    with _timeline.span("wait", line):
        while len(queue) > left:
            backend.finish(queue.popleft(), device)
    _metrics.waited(start)
