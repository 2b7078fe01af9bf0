"""What it costs to watch: the user's line of every operator, and `torch_xla.debug.profile()`.

What is compared is taken in turns in one process, since both sides must meet the same machine.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.workloads import Workload

ROUNDS = 9
STEPS = 40
REPORTED_STEPS = 200


def pipelined(workload: Workload, steps: int) -> float:
    """Seconds of one of so many steps, each with a barrier that is not waited for."""
    import torch_xla
    import torch_xla.core.xla_model as xm

    start = perf_counter()
    for _ in range(steps):
        # A loss that is kept until the barrier is over; a dropped one is no output, and so another graph.
        loss = workload.step()
        torch_xla.sync()
    xm.wait_device_ops()
    assert loss.device.type == "xla"
    return (perf_counter() - start) / steps


def observe(name: str) -> dict[str, float]:
    """Ratios of watched to unwatched for one workload, and the size of a report of 200 steps."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    from benchmarks import workloads
    from torch_xla import _bindings

    workload = workloads.build(name, torch_xla.device())
    steps = STEPS if name == "mlp" else 4

    def record(frames: bool) -> float:
        # What XLA_NOTICES decides once, at import.
        _bindings.set_frame_depth(int(frames))
        times = []
        for _ in range(steps):
            start = perf_counter()
            loss = workload.step()
            times.append(perf_counter() - start)
            torch_xla.sync()
            xm.wait_device_ops()
        assert loss.device.type == "xla"
        return median(times)

    def profiled(count: int) -> float:
        with torch_xla.debug.profile() as profile:
            seconds = pipelined(workload, count)
        assert len(profile.report.runs) == count
        return seconds

    record(True)
    pipelined(workload, steps)
    rounds = 3 * ROUNDS if name == "mlp" else ROUNDS  # its steps are as short as a machine's hiccups
    frames = [record(True) / record(False) for _ in range(rounds)]
    _bindings.set_frame_depth(1)
    watched = [profiled(steps) / pipelined(workload, steps) for _ in range(rounds)]
    figures = {f"{name}_frames_ratio": median(frames), f"{name}_profile_ratio": median(watched)}
    if name == "mlp":
        with torch_xla.debug.profile() as profile:
            pipelined(workload, REPORTED_STEPS)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "report.html"
            start = perf_counter()
            profile.save(path)
            figures["report_save_s"] = perf_counter() - start
            figures["report_mb"] = path.stat().st_size / 1e6
    return figures
