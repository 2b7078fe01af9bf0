"""What it costs to watch: the user's line of every operator, and `torch_xla.debug.profile()`.

What is compared is taken in turns in one process, since both sides must meet the same machine.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

ROUNDS = 9
STEPS = 40
REPORTED_STEPS = 200


def observe(name: str) -> dict[str, float]:
    """Ratios of watched to unwatched for one workload, and the size of a report of 200 steps."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    from benchmarks import workloads
    from torch_xla import _bindings

    workload = workloads.build(name, torch_xla.device())
    steps = STEPS if name == "mlp" else 4

    def record(frames: bool) -> float:
        # What XLA_RETRACE_REPORT decides once, at import.
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

    def loop(count: int) -> float:
        start = perf_counter()
        for _ in range(count):
            loss = workload.step()
            torch_xla.sync()
        xm.wait_device_ops()
        assert loss.device.type == "xla"
        return (perf_counter() - start) / count

    def profiled(count: int) -> float:
        with torch_xla.debug.profile() as profile:
            seconds = loop(count)
        assert len(profile.report.runs) == count
        return seconds

    record(True)
    loop(steps)
    frames = [record(True) / record(False) for _ in range(ROUNDS)]
    _bindings.set_frame_depth(1)
    watched = [profiled(steps) / loop(steps) for _ in range(ROUNDS)]
    figures = {f"{name}_frames_ratio": median(frames), f"{name}_profile_ratio": median(watched)}
    if name == "mlp":
        with torch_xla.debug.profile() as profile:
            loop(REPORTED_STEPS)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "report.html"
            start = perf_counter()
            profile.save(path)
            figures["report_save_s"] = perf_counter() - start
            figures["report_mb"] = path.stat().st_size / 1e6
    return figures
