"""Steps of a workload by torch_xla, its backend openxla, torch eager, torch.compile and JAX, each alone in its process.

XLA's threads slow PyTorch's down in the same process, and the other way round. So each turn has a process of its own:
A B C D A B C D. Figures are medians of the turns; PyTorch's own sides run with one thread and with all, and the better
counts.

`python -m benchmarks.sides SIDE WORKLOAD` prints one turn's figures as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from benchmarks.processes import measured

Figures = dict[str, float]

WORKLOADS = {"mlp": "(a)", "resnet": "(b)", "gpt2": "(c)", "unet": "(d)", "llama": "(f)"}
OTHERS = {"vit": "ViT-B/16", "sd_train": "U-Net, training", "bert": "BERT", "lstm": "LSTM"}  # without a side in JAX
TURNS = 3
WARM_SECONDS = 2.0  # at least so long, and so many steps, until everything is compiled
WARM_STEPS = 12
TIMED_SECONDS = 3.0
TIMED_STEPS = 10
MAX_STEPS = 600


def _steps(step: Callable[[], object], end: Callable[[], object]) -> Figures:
    """First step and median of later ones, in blocks of pipelined steps.

    Args:
        step: Starts a step.
        end: Waits for those that were started.
    """

    def block(count: int) -> float:
        start = perf_counter()
        for _ in range(count):
            kept = step()
        end()
        del kept
        return (perf_counter() - start) / count

    first = block(1)
    began, done = perf_counter(), 0
    while done < WARM_STEPS or perf_counter() - began < WARM_SECONDS:
        last = block(3)
        done += 3
    count = max(1, min(20, int(0.2 / last)))
    began, times = perf_counter(), []
    while len(times) < TIMED_STEPS or (perf_counter() - began < TIMED_SECONDS and len(times) * count < MAX_STEPS):
        times.append(block(count))
    return {"first_step_s": first, "step_ms": median(times) * 1e3}


def _build(name: str, device: Any) -> Any:
    from benchmarks import untuned, workloads

    return (workloads.WORKLOADS | untuned.WORKLOADS)[name](device)


def _on_xla(name: str, backend: str | None = None) -> Figures:
    """Also the counts, and the host time of recording and of the barrier with the device idle."""
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.debug.metrics as met

    workload = _build(name, torch_xla.device())
    if backend is not None:
        from benchmarks.workloads import compile_in_place

        compile_in_place(workload.model, backend=backend)
    torch_xla.sync(wait=True)
    met.clear_all()

    def step() -> object:
        loss = workload.step()  # kept until the barrier is over: a dropped one is no output, and so another graph
        torch_xla.sync()
        return loss

    figures = _steps(step, xm.wait_device_ops)
    figures["compiles"] = met.counter_value("UncachedCompile") or 0
    for key, metric in (("lowering_s", "LoweringTime"), ("compile_s", "CompileTime")):
        data = met.metric_data(metric)
        figures[key] = data[1] / 1e9 if data else 0.0
    recording, syncing = [], []
    for _ in range(100 if figures["step_ms"] < 20 else 20):
        start = perf_counter()
        loss = workload.step()
        recorded = perf_counter()
        torch_xla.sync()
        recording.append(recorded - start)
        syncing.append(perf_counter() - recorded)
        xm.wait_device_ops()
        del loss
    return figures | {"record_ms": median(recording) * 1e3, "sync_ms": median(syncing) * 1e3}


def _on_cpu(name: str, compiled: bool = False) -> Figures:
    workload = _build(name, "cpu")
    if compiled:
        from benchmarks.workloads import compile_in_place

        compile_in_place(workload.model)
    return _steps(workload.step, lambda: None)


def _jax(name: str) -> Figures:
    from benchmarks.jax_steps import STEPS

    hand = STEPS[name]()
    latest = []

    def step() -> object:
        latest[:] = [hand.step()]
        return latest[0]

    return _steps(step, lambda: latest[0].block_until_ready())


SIDES: dict[str, Callable[[str], Figures]] = {
    "ours": _on_xla,
    "openxla": partial(_on_xla, backend="openxla"),
    "eager": _on_cpu,
    "inductor": partial(_on_cpu, compiled=True),
    "jax": _jax,
}
_BY_THREADS = ("eager", "inductor")


def _spread(turns: list[Figures]) -> float:
    times = [turn["step_ms"] for turn in turns]
    return max(times) / min(times) - 1


def compare(name: str) -> Figures:
    """Medians over the turns of every side of a workload, their spread, and what they are to each other."""
    sides = [side for side in SIDES if name in WORKLOADS or side != "jax"]
    ways = [(side, threads) for side in sides for threads in ("1", "") if side in _BY_THREADS or not threads]
    turns: dict[tuple[str, str], list[Figures]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as folder:  # the first turn compiles all
        for _ in range(TURNS):
            for side, threads in turns:
                settings = {"TORCHINDUCTOR_CACHE_DIR": os.path.join(folder, threads or "all")}
                settings |= {"OMP_NUM_THREADS": threads} if threads else {}
                turns[side, threads].append(measured("sides", side, name, settings=settings))
    figures: Figures = {}
    for side in sides:
        of_side = [taken for (other, _), taken in turns.items() if other == side]
        best = min(of_side, key=lambda taken: median(turn["step_ms"] for turn in taken))
        prefix = "" if side == "ours" else f"{side}_"
        figures |= {f"{prefix}{key}": median(turn[key] for turn in best) for key in best[0]}
        figures[f"{prefix}first_step_s"] = best[0]["first_step_s"]  # later ones may find programs on the disk
        figures[f"{prefix}spread"] = _spread(best)
    ours = figures["step_ms"]
    if figures["compile_s"]:
        figures["lowering_ratio"] = figures["lowering_s"] / figures["compile_s"]
    host, openxla_host = (figures[f"{side}record_ms"] + figures[f"{side}sync_ms"] for side in ("", "openxla_"))
    figures["openxla_ratio"] = openxla_host / host
    figures["record_ratio"] = figures["record_ms"] / figures["eager_step_ms"]
    if "jax_step_ms" in figures:
        figures["step_ratio"] = ours / max(figures["record_ms"], figures["jax_step_ms"])
    figures["best_ratio"] = ours / min(figures["eager_step_ms"], figures["inductor_step_ms"])
    return {f"{name}_{key}": value for key, value in figures.items()}


if __name__ == "__main__":
    print(json.dumps(SIDES[sys.argv[1]](sys.argv[2])))
