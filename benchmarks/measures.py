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
from statistics import mean, median
from time import perf_counter

from benchmarks import changing
from benchmarks.observe import observe, pipelined

Figures = dict[str, float]

# Enough work for a stable median, little enough for `make bench` to stay a coffee break on two cores.
BLOCK_SECONDS = 1.0
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


def _seconds(metric: str) -> float:
    import torch_xla.debug.metrics as met

    data = met.metric_data(metric)
    return data[1] / 1e9 if data else 0.0


def _workload(name: str) -> Figures:
    """First step, compiles, recording, barrier and pipelined step of one workload, beside torch eager and JAX."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as met
    from benchmarks import workloads
    from benchmarks.jax_steps import STEPS

    lazy = workloads.build(name, torch_xla.device())
    torch_xla.sync(wait=True)
    met.clear_all()
    figures: Figures = {}

    def whole_step() -> float:
        loss = lazy.step()
        torch_xla.sync()
        return loss.item()

    figures["first_step_s"] = timed(whole_step)
    # Every loop here keeps the loss until the barrier is over: a dropped one is no output, and so another graph.
    for _ in range(19):
        whole_step()
    figures["compiles"] = met.counter_value("UncachedCompile") or 0
    figures["lowering_s"], figures["compile_s"] = _seconds("LoweringTime"), _seconds("CompileTime")
    figures["lowering_ratio"] = figures["lowering_s"] / figures["compile_s"]

    eager = workloads.build(name, "cpu")
    figures["eager_first_step_s"] = timed(lambda: eager.step().item())
    hand = STEPS[name]()
    figures["jax_first_step_s"] = timed(lambda: hand.step().block_until_ready())
    xm.wait_device_ops()

    def record_block(steps: int) -> list[tuple[float, float]]:
        """Recording and the barrier's host time, with the device idle: its threads share the cores on a CPU."""
        pairs = []
        for _ in range(steps):
            start = perf_counter()
            loss = lazy.step()
            pairs.append((perf_counter() - start, timed(torch_xla.sync)))
            xm.wait_device_ops()
        assert loss.device.type == "xla"
        return pairs

    # Eager's threads spin for a while after each step: the first three barriers after one take twice as long. The two
    # take turns by so many steps that medians leave those out.
    recorded: list[tuple[float, float]] = []
    execute: list[float] = []
    turn = max(5, min(50, int(BLOCK_SECONDS / timed(eager.step))))
    started = perf_counter()
    while len(recorded) < 4 * turn and (not recorded or perf_counter() - started < 20):
        recorded += record_block(turn)
        execute += [timed(eager.step) for _ in range(turn)]
    figures["record_ms"] = median(recording for recording, _ in recorded) * 1e3
    figures["sync_ms"] = median(syncing for _, syncing in recorded) * 1e3
    figures["eager_step_ms"] = median(execute) * 1e3
    figures["record_ratio"] = figures["record_ms"] / figures["eager_step_ms"]

    steps = max(3, min(300, int(BLOCK_SECONDS / max(pipelined(lazy, 3), hand.pipelined(3)))))
    # A ratio per round: machines change their speed between rounds more than within one. All three are means, since a
    # machine's hiccups are in the mean of a pipelined step but not in the median of a recording.
    rounds = [
        (mean(recording for recording, _ in record_block(steps)), pipelined(lazy, steps), hand.pipelined(steps))
        for _ in range(ROUNDS)
    ]
    figures["step_ms"] = median(step for _, step, _ in rounds) * 1e3
    figures["jax_step_ms"] = median(hand_step for _, _, hand_step in rounds) * 1e3
    figures["step_ratio"] = median(step / max(recording, hand_step) for recording, step, hand_step in rounds)
    return {f"{name}_{key}": value for key, value in figures.items()}


def _inductor(name: str) -> Figures:
    """First and median step of the same program with its model under torch.compile, nothing cached on disk."""
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    import torch

    from benchmarks import workloads

    workload = workloads.build(name, "cpu")
    workload.model = torch.compile(workload.model)  # type: ignore[assignment]
    first = timed(lambda: workload.step().item())
    for _ in range(3):
        workload.step()
    times: list[float] = []
    while len(times) < 100 and (len(times) < 10 or sum(times) < 5):
        times.append(timed(workload.step))
    return {f"{name}_inductor_first_step_s": first, f"{name}_inductor_step_ms": median(times) * 1e3}


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
    "mlp": lambda: _workload("mlp"),
    "resnet": lambda: _workload("resnet"),
    "gpt2": lambda: _workload("gpt2"),
    "mlp_inductor": lambda: _inductor("mlp"),
    "resnet_inductor": lambda: _inductor("resnet"),
    "gpt2_inductor": lambda: _inductor("gpt2"),
    "mlp_observe": lambda: observe("mlp"),
    "gpt2_observe": lambda: observe("gpt2"),
    "graphs": _graphs,
    "import_time": import_time,
    "memory": memory,
    **changing.MEASURES,
}


if __name__ == "__main__":
    print(json.dumps(MEASURES[sys.argv[1]]()))
