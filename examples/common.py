"""What the examples share: refusals in one line, the peers' step times, the counters that they print, plots."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from torch import nn

import torch_xla
import torch_xla.debug.metrics as met


def refuse(text: str) -> NoReturn:
    """Ends the program with one line on stderr and exit status 1."""
    raise SystemExit(f"{Path(sys.argv[0]).stem}: {text}")


def positive(text: str) -> int:
    """A number above zero, as a type of `argparse`."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"got {text}, expected a number above zero")
    return int(text)


def compiles() -> int:
    """How many graphs were compiled so far."""
    return met.counter_value("UncachedCompile") or 0


def wait(device: torch.device | str) -> None:
    """Waits until the device has done what it was given."""
    if torch.device(device).type == "xla":
        torch_xla.sync(wait=True)


def graphs(count: int) -> str:
    """So many graphs, in words."""
    return f"{count} graph{'' if count == 1 else 's'}"


def seconds_per_step(step: Callable[[], object], device: torch.device | str, seconds: float = 3.0) -> float:
    """Time of a step where steps follow each other, after two that warm up.

    Args:
        step: Runs a step. On an xla device a barrier is put after it.
        device: Where it runs.
        seconds: About how long to measure.
    """
    on_xla = torch.device(device).type == "xla"

    def timed(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            result = step()
            if on_xla:
                torch_xla.sync()
            del result  # only now: what nobody has any more is not computed
        wait(device)
        return time.perf_counter() - began

    timed(2)
    once = timed(1)
    count = max(2, round(seconds / max(once, 1e-6)))
    return timed(count) / count


def compare_with_peers(build: Callable[[str, bool], Callable[[], object]], seconds: float = 3.0) -> None:
    """Prints the time of a step on device xla beside PyTorch's eager mode and ``torch.compile`` on the CPU.

    Args:
        build: Makes a step, given a device and whether the model goes through ``torch.compile``.
        seconds: About how long to measure each.
    """
    times = {
        "torch_xla": seconds_per_step(build("xla", False), "xla", seconds),
        "eager": seconds_per_step(build("cpu", False), "cpu", seconds),
    }
    try:
        times["torch.compile"] = seconds_per_step(build("cpu", True), "cpu", seconds)
    except Exception as error:  # there may be no compiler for it
        print(f"torch.compile failed: {str(error).splitlines()[0]}")
    own = times["torch_xla"]
    for name, value in times.items():
        print(f"a step with {name}: {value * 1e3:.1f} ms, {value / own:.2f} of torch_xla's")


def draw_curve(values: Sequence[float], steps: Sequence[int], title: str, path: Path) -> None:
    """Writes a curve over the steps to a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(steps, values)
    axes.set(title=title, xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def parameters_of(model: nn.Module) -> int:
    """How many numbers the model has."""
    return sum(parameter.numel() for parameter in model.parameters())
