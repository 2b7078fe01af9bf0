"""Starts programs, without waiting for the device, and waits for devices."""

from __future__ import annotations

import time

from torch_xla import _bindings, _events, _metrics
from torch_xla._core.compile.compiler import Executable
from torch_xla._core.compile.dispatch import debug_checks_off


def run(executable: Executable, graph: _bindings.Graph) -> None:
    """Starts the program on the graph's inputs and gives its results to the tensors; the graph is empty afterwards.

    Raises ExecutionError where an earlier program failed, and this one was not started, RuntimeError where it could not
    be, or a host callback in it failed.
    """
    device, key = graph.device, graph.key
    in_flight = _bindings.in_flight(device)
    if in_flight.programs >= _bindings.MAX_PROGRAMS_IN_FLIGHT:
        with _events.span("wait"):
            in_flight.wait_for_programs(_bindings.MAX_PROGRAMS_IN_FLIGHT - 1)
    start = time.perf_counter()
    with debug_checks_off(), _events.span(_metrics.stage("ExecuteTime")):
        token = graph.execute(executable.program)
    _events.launched(device, key, start, executable, token)


def wait(device: int) -> None:
    """Returns when the device has finished all that was started.

    Raises ExecutionError where a program failed; a torch.OutOfMemoryError too where it did not fit into the memory.
    """
    in_flight = _bindings.in_flight(device)
    if in_flight.programs:
        with _events.span("wait", _bindings.user_frame):
            in_flight.wait_for_programs()
