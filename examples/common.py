"""What the examples share: refusals in one line, the peers' step times, the counters that they print, plots."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NoReturn

import torch
from torch import nn

import torch_xla
import torch_xla.debug.metrics as met

# Sides that `--peers` compares: the device, and whether the model goes through torch.compile.
PEERS = {"torch_xla": ("xla", False), "eager": ("cpu", False), "torch.compile": ("cpu", True)}


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
    """Time of a step where steps follow each other, after as many that warm up: cheap graphs are compiled late.

    Args:
        step: Runs a step. On an xla device a barrier is put after it.
        device: Where it runs.
        seconds: About how long to warm up, and to measure.
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
    count = max(3, round(seconds / max(timed(1), 1e-6)))
    timed(count)
    return timed(count) / count


def add_peers(parser: argparse.ArgumentParser) -> None:
    """The option that has steps timed and nothing else done."""
    parser.add_argument(
        "--peers",
        nargs="?",
        const="all",
        choices=("all", *PEERS),
        help="only time steps, beside PyTorch on the CPU; or one side's, in seconds",
    )


def compare_with_peers(side: str, builds: Mapping[str, Callable[[str, bool], Callable[[], object]]]) -> None:
    """Prints the time of steps on device xla beside PyTorch's eager mode and ``torch.compile`` on the CPU.

    Each side runs this program again with its own name, in turns: in one process their threads disturb each other.

    Args:
        side: What ``--peers`` says: one of `PEERS`, whose seconds are printed as JSON, or ``all``.
        builds: By what they are called, functions that make a step, given a device and whether the model goes through
            ``torch.compile``.
    """
    if side != "all":
        device, compiled = PEERS[side]
        print(json.dumps({what: seconds_per_step(build(device, compiled), device) for what, build in builds.items()}))
        return
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in PEERS}
    for _ in range(3):
        for name, taken in turns.items():
            command = [sys.executable, *sys.orig_argv[1:], "--peers", name]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=name != "torch.compile")
            if done.returncode == 0:  # there may be no compiler for it
                taken.append(json.loads(done.stdout.splitlines()[-1]))
    for what in builds:
        own = median(taken[what] for taken in turns["torch_xla"])
        for name in PEERS:
            times = sorted(taken[what] for taken in turns[name])
            if times:
                middle, spread = median(times), times[-1] / times[0] - 1
                print(f"{what}, {name}: {middle * 1e3:.1f} ms (spread {spread:.0%}), {middle / own:.2f} of torch_xla's")


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
