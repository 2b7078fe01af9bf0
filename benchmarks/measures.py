"""The measurements, each for a process of its own: `python -m benchmarks.measures NAME` prints figures as JSON.

A fresh process keeps one measurement's caches, threads and memory out of the next. Within one, what is compared is
taken in turns, and a figure is the median of its repetitions.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter

from benchmarks import changing, reads, sides
from benchmarks.observe import observe

Figures = dict[str, float]

ROUNDS = 9


def timed(function: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    start = perf_counter()
    function()
    return perf_counter() - start


def record_ops() -> Figures:
    """Microseconds to record one op, from chains of 1,000 that are dropped unexecuted."""
    import torch

    import torch_xla
    from torch_xla import experimental

    experimental.auto_barrier(False)  # it would cut such a chain
    length = 1000
    x, y = (torch.randn(8, 8).to(torch_xla.device()) for _ in range(2))
    torch_xla.sync(wait=True)

    def chain(op: Callable[[torch.Tensor], torch.Tensor]) -> float:
        z = x.clone()
        start = perf_counter()
        for _ in range(length):
            z = op(z)
        return (perf_counter() - start) / length * 1e6

    ops: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "add": lambda z: z + y,
        "mm": lambda z: torch.mm(z, y),
        "relu": lambda z: torch.relu(z),
        "add_": lambda z: z.add_(y),
    }
    times: dict[str, list[float]] = {name: [] for name in ops}
    for _ in range(500):
        for name, op in ops.items():
            times[name].append(chain(op))
    return {f"record_{name}_us": median(values) for name, values in times.items()}


def sync_empty() -> Figures:
    """Microseconds of a barrier with nothing pending, with a live tensor on the device."""
    import torch

    import torch_xla

    keep = torch.ones(8).to(torch_xla.device())
    torch_xla.sync(wait=True)

    def many() -> None:
        for _ in range(1000):
            torch_xla.sync()

    figure = median(timed(many) for _ in range(ROUNDS)) * 1e3
    assert keep.sum().item() == 8
    return {"sync_empty_us": figure}


_IMPORT = """
import os, sys, time, torch
tasks = len(os.listdir("/proc/self/task"))
start = time.perf_counter()
import torch_xla
seconds = time.perf_counter() - start
threads = len(os.listdir("/proc/self/task")) - tasks
print(seconds, threads, int("jax" in sys.modules))
"""


def import_time() -> Figures:
    """Seconds of `import torch_xla` after torch, and what it starts."""
    rows = []
    for _ in range(ROUNDS + 1):
        output = subprocess.run([sys.executable, "-c", _IMPORT], check=True, capture_output=True, text=True).stdout
        rows.append([float(field) for field in output.split()])
    # The first one may still be filling the file cache.
    return {
        "import_s": median(row[0] for row in rows[1:]),
        "import_threads": max(row[1] for row in rows),
        "import_jax": max(row[2] for row in rows),
    }


def memory() -> Figures:
    """Growth of the resident memory and of the number of device buffers over 2,000 steps of (a)."""
    import jax

    import torch_xla
    import torch_xla.core.xla_model as xm
    from benchmarks import workloads

    workload = workloads.build("mlp", torch_xla.device())

    def run(steps: int) -> tuple[float, int]:
        for _ in range(steps):
            loss = workload.step()
            torch_xla.sync()
        assert loss.isfinite()
        del loss
        xm.wait_device_ops()
        gc.collect()
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(jax.live_arrays())

    before, buffers_before = run(200)
    after, buffers_after = run(2000)
    return {
        "memory_mb": after,
        "memory_growth_percent": (after / before - 1) * 100,
        "memory_buffers": buffers_after,
        "memory_buffer_growth": buffers_after - buffers_before,
    }


def _graphs() -> Figures:
    from benchmarks import graphs

    return graphs.both()


MEASURES: dict[str, Callable[[], Figures]] = {
    "record_ops": record_ops,
    "sync_empty": sync_empty,
    **{name: partial(sides.compare, name) for name in (*sides.WORKLOADS, *sides.OTHERS)},
    "mlp_observe": lambda: observe("mlp"),
    "gpt2_observe": lambda: observe("gpt2"),
    "graphs": _graphs,
    "import_time": import_time,
    "memory": memory,
    **changing.MEASURES,
    **reads.MEASURES,
}


if __name__ == "__main__":
    print(json.dumps(MEASURES[sys.argv[1]]()))
