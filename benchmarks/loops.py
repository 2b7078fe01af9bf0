"""What the search for loops costs, and what a loop without a barrier costs beside one with a barrier.

`python -m benchmarks.loops` prints figures as JSON; they are taken in turns, each a median.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

import torch_xla
from benchmarks import workloads
from torch_xla import _bindings, _metrics, experimental

ROUNDS = 12
STEPS = 40


def recording(name: str = "mlp") -> dict[str, float]:
    """Seconds of recording a step with the search for loops ÷ without it; every step has a barrier."""
    step = workloads.build(name, torch_xla.device()).step

    def block(follow: bool) -> float:
        experimental.auto_barrier(follow)
        times = []
        for _ in range(STEPS):
            start = perf_counter()
            kept = step()
            times.append(perf_counter() - start)
            torch_xla.sync(wait=True)
            del kept
        return sorted(times)[STEPS // 4]

    block(True)
    ratios = [block(True) / block(False) for _ in range(ROUNDS)]
    experimental.auto_barrier(False)
    return {f"{name}_search_ratio": median(ratios)}


def without_barrier(name: str = "mlp") -> dict[str, float]:
    """Seconds of a training loop without barriers ÷ with one in each step, once both are compiled.

    The first ratio is of the steps beyond those in which the loop is found, the total one of all; the share is that of
    the search in it.
    """
    step = workloads.build(name, torch_xla.device()).step
    torch_xla.sync(wait=True)
    experimental.auto_barrier(True)

    def loop(steps: int, after: Callable[[], None]) -> float:
        start = perf_counter()
        for _ in range(steps):
            step()
            after()
        torch_xla.sync(wait=True)
        return (perf_counter() - start) / steps

    def nothing() -> None:
        pass

    before = _compiles()
    loop(5, torch_xla.sync)
    marked = _compiles() - before
    loop(STEPS, nothing)
    found = _compiles() - before - marked
    # What comes before a loop is found, and after its end, is not the loop: the two lengths differ in it alone.
    pairs, totals, shares = [], [], []
    for _ in range(ROUNDS):
        with_barrier = loop(STEPS, torch_xla.sync)
        short = loop(STEPS, nothing) * STEPS
        with _searching() as search:
            long = loop(3 * STEPS, nothing) * 3 * STEPS
        pairs.append((long - short) / (2 * STEPS) / with_barrier)
        totals.append(long / (3 * STEPS) / with_barrier)
        shares.append(search.seconds / long)
    experimental.auto_barrier(False)
    return {
        f"{name}_no_barrier_ratio": median(pairs),
        f"{name}_no_barrier_total_ratio": median(totals),
        f"{name}_search_share": median(shares),
        f"{name}_compiles_with_barrier": marked,
        f"{name}_compiles_without": found,
    }


@dataclass
class _Search:
    seconds: float = 0.0


@contextmanager
def _searching() -> Iterator[_Search]:
    """How long is looked for loops inside the block."""
    spent, find = _Search(), _bindings.find_loop

    def timed(device: int) -> Any:
        start = perf_counter()
        try:
            return find(device)
        finally:
            spent.seconds += perf_counter() - start

    with patch.object(_bindings, "find_loop", timed):
        yield spent


def _compiles() -> int:
    return _metrics.counter("UncachedCompile") or 0


def reads(name: str = "mlp", every: int = 10) -> dict[str, float]:
    """Compiles of a loop with barriers in which the loss is read now and then, beyond those of one without reads."""
    workload = workloads.build(name, torch_xla.device())
    for _ in range(3):
        workload.step()
        torch_xla.sync()
    before = _compiles()
    for i in range(3 * every):
        loss = workload.step()
        if i % every == 0:
            loss.item()
        torch_xla.sync()
    return {f"{name}_read_compiles": _compiles() - before}


if __name__ == "__main__":
    torch.set_num_threads(1)
    names = sys.argv[1:] or ["mlp"]
    figures: dict[str, float] = {}
    for chosen in names:
        for measure in (recording, without_barrier, reads):
            figures |= measure(chosen)
    print(json.dumps(figures))
