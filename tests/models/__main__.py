"""Trains small models of many architectures, and draws with many samplers, on xla and on the CPU; writes a table.

    PYTHONPATH=tests:tests/callers python -m models [--deep] [NAME ...]

A name takes those that have it in theirs, and then the table is printed only. It ends with 1 where a value differs, or
a graph is compiled after the first step. `--deep` trains models of many layers on xla alone, rolled up into loops and
not, and prints how many of a step's operators are in loops.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ.setdefault("XLA_NOTICES", "none")  # model after model at the same line is no loop

import diffusers
import test_diffusers
import torch
import transformers
from tqdm import tqdm

import torch_xla
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
from models.zoo import ARCHITECTURES, DEEP, Architecture
from torch_xla import debug

REPORT = Path(__file__).parents[2] / "docs" / "models.md"
STEPS, RATE = 6, 1e-3
TOLERANCE = 1e-3  # of a loss, relative, and of an image
HALF_TOLERANCE = 0.05  # of a loss in 16 bits, relative to the largest
DEEP_STEPS = {torch.float32: STEPS, torch.float64: 20}
DEEP_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}  # of a loss, relative
IN_FLOAT64 = ("GPT2", "Llama", "ViT", "T5", "MLP")  # experts multiply by a grouped product, which takes none
SAMPLERS = """
DDIM DDPM PNDM LMSDiscrete EulerDiscrete EulerAncestralDiscrete HeunDiscrete KDPM2Discrete KDPM2AncestralDiscrete
DPMSolverMultistep DPMSolverSinglestep UniPCMultistep DEISMultistep SASolver IPNDM LCM TCD EDMEuler
""".split()


@dataclass
class Outcome:
    """What one row of a table says.

    Attributes:
        difference: Largest, between the two devices.
        tolerance: Of it.
        compiles: Graphs compiled in the first step, and in all later ones.
        seconds: The first step on xla, and the last.
        on_host: Operators that ran on the host.
        loops: What of a step's operators is in loops.
        error: What was raised, if anything.
    """

    difference: float = 0.0
    tolerance: float = TOLERANCE
    compiles: tuple[int, int] = (0, 0)
    seconds: tuple[float, float] = (0.0, 0.0)
    on_host: list[str] = field(default_factory=list)
    loops: str = ""
    error: str = ""

    def passes(self) -> bool:
        return not self.error and self.difference < self.tolerance and self.compiles[1] == 0

    def row(self, name: str) -> str:
        if self.error:
            return f"| {name} | {self.error} | | | |"
        first, later = self.seconds
        return (
            f"| {name} | {self.difference:.0e} | {self.compiles[0]} + {self.compiles[1]} | {first:.1f} s, then "
            f"{later * 1e3:.0f} ms | {self.loops or ', '.join(self.on_host) or '—'} |"
        )


def moved(batch: dict[str, Any], device: str) -> dict[str, Any]:
    return {key: value.to(device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def losses(model: torch.nn.Module, batches: Iterable[dict[str, Any]]) -> Iterator[float]:
    """A loss per training step, each of which has a batch of its own."""
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    for batch in batches:
        torch.manual_seed(1)
        result = model(**batch)
        loss = result.get("loss")
        if loss is None:
            loss = sum((part.float() ** 2).mean() for part in result.to_tuple() if isinstance(part, torch.Tensor))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch_xla.sync()
        yield loss.item()


def compiled() -> int:
    return int(met.counter_value("UncachedCompile") or 0)


def train(architecture: Architecture, dtype: torch.dtype = torch.float32) -> Outcome:
    """Some steps on each device, on xla with parameters and inputs of one type, and on the CPU in float32."""
    model = architecture.build().to(dtype)
    generator = torch.Generator().manual_seed(0)
    batches = [architecture.batch(generator) for _ in range(STEPS)]
    narrow = [{key: value.to(dtype) if _floats(value) else value for key, value in batch.items()} for batch in batches]
    on_xla = copy.deepcopy(model).to("xla")
    expected = list(losses(model.float(), batches))
    met.clear_all()
    result, counts, times = [], [0], [perf_counter()]
    for loss in losses(on_xla, (moved(batch, "xla") for batch in narrow)):
        result.append(loss)
        counts.append(compiled())
        times.append(perf_counter())
    whole = dtype == torch.float32
    difference = max(abs(a - b) / abs(b if whole else max(expected)) for a, b in zip(result, expected, strict=True))
    seconds = (times[1] - times[0], times[-1] - times[-2])
    tolerance = TOLERANCE if whole else HALF_TOLERANCE
    return Outcome(difference, tolerance, (counts[1], counts[-1] - counts[1]), seconds, on_host())


def train_deep(architecture: Architecture, dtype: torch.dtype = torch.float32) -> Outcome:
    """Some steps on xla, rolled up and not."""
    model = architecture.build().to(dtype)
    generator = torch.Generator().manual_seed(0)
    batches = [architecture.batch(generator) for _ in range(DEEP_STEPS[dtype])]
    batches = [{key: value.to(dtype) if _floats(value) else value for key, value in b.items()} for b in batches]
    expected, *_ = _deep_losses(model, batches, "0")
    result, counts, times, loops = _deep_losses(model, batches, os.environ.get("XLA_ROLL_LAYERS", "1"))
    difference = max(abs(a - b) / abs(b) for a, b in zip(result, expected, strict=True))
    compiles, seconds = (counts[0], counts[-1] - counts[0]), (times[0], times[-1] - times[-2])
    return Outcome(difference, DEEP_TOLERANCE[dtype], compiles, seconds, loops=loops)


def _deep_losses(
    model: torch.nn.Module, batches: list[dict[str, Any]], setting: str
) -> tuple[list[float], list[int], list[float], str]:
    """Losses, how many graphs were compiled and the seconds after each, and what is in loops."""
    on_xla = copy.deepcopy(model).to("xla")
    torch_xla.sync()
    met.clear_all()
    result, counts, times, start = [], [], [], perf_counter()
    before, os.environ["XLA_ROLL_LAYERS"] = os.environ.get("XLA_ROLL_LAYERS"), setting
    try:
        with debug.profile() as profile:
            for loss in losses(on_xla, (moved(batch, "xla") for batch in batches)):
                result.append(loss)
                counts.append(compiled())
                times.append(perf_counter() - start)
    finally:
        os.environ.pop("XLA_ROLL_LAYERS")
        if before is not None:
            os.environ["XLA_ROLL_LAYERS"] = before
    step = max(profile.report.compiles, key=lambda c: c.operators)
    inside = sum(count * size for count, size in step.loops)
    runs = ", ".join(f"{count} × {size}" for count, size in step.loops)
    return result, counts, times, f"{inside} of {step.operators} ({inside / step.operators:.0%}): {runs or 'none'}"


def _floats(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def on_host() -> list[str]:
    """Operators that ran there; reading the loss is not one."""
    return [name.split("::")[1] for name in met.executed_fallback_ops() if name != "aten::_local_scalar_dense"]


def draw(name: str) -> Outcome:
    """An image by a small Stable Diffusion, twice."""
    torch.manual_seed(1)
    pipeline, inputs = test_diffusers.stable_diffusion()
    pipeline.set_progress_bar_config(disable=True)
    kind = getattr(diffusers, f"{name}Scheduler")
    pipeline.scheduler = kind() if name == "EDMEuler" else kind.from_config(pipeline.scheduler.config)
    expected = test_diffusers.run(pipeline, inputs, "cpu", 8)
    pipeline.to("xla")
    met.clear_all()
    counts, times, difference = [0], [perf_counter()], 0.0
    for _ in range(2):
        result = test_diffusers.run(pipeline, inputs, "xla", 8)
        difference = max(difference, (result - expected).abs().max().item())
        counts.append(compiled())
        times.append(perf_counter())
    compiles, seconds = (counts[1], counts[2] - counts[1]), (times[1] - times[0], times[2] - times[1])
    return Outcome(difference, TOLERANCE, compiles, seconds, on_host())


def attempt(what: Callable[[Any], Outcome], given: Any) -> Outcome:
    try:
        return what(given)
    except Exception as error:
        return Outcome(error=f"{type(error).__name__}: {str(error).splitlines()[0]}")


def table(title: str, step: str, outcomes: dict[str, Outcome]) -> str:
    passing = sum(outcome.passes() for outcome in outcomes.values())
    head = f"| | largest difference | compiles, {step} + later | time | on the host |\n|---|---|---|---|---|\n"
    rows = "\n".join(outcome.row(name) for name, outcome in outcomes.items())
    return f"## {title}: {passing} of {len(outcomes)}\n\n{head}{rows}"


def sweep_deep(wanted: Callable[[str], bool]) -> int:
    """Prints the table of models of many layers as it grows; gives 1 where one fails."""
    os.environ.update(XLA_HOST_COMPUTE="never")  # each graph is compiled
    failing = []
    for dtype, chosen in ((torch.float32, None), (torch.float64, IN_FLOAT64)):
        title = f"{'some' if chosen else 'all'} in {dtype}: difference, compiles, time, operators in loops"
        print(f"\n{title}", flush=True)
        for architecture in DEEP:
            name = architecture.model
            if wanted(name) and (chosen is None or name.startswith(chosen)):
                outcome = attempt(partial(train_deep, dtype=dtype), architecture)
                failing += [] if outcome.passes() else [f"{name} in {dtype}"]
                print(outcome.row(name), flush=True)
    print(f"{len(failing)} failing{': ' if failing else ''}{', '.join(failing)}")
    return int(bool(failing))


def main() -> int:
    parser = argparse.ArgumentParser(prog="models", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--deep", action="store_true", help="models of many layers, rolled up and not")
    arguments = parser.parse_args()
    names = [name.lower() for name in arguments.names]
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    diffusers.utils.logging.set_verbosity_error()

    def wanted(name: str) -> bool:
        return not names or any(part in name.lower() for part in names)

    if arguments.deep:
        return sweep_deep(wanted)
    models = {a.model: a for a in ARCHITECTURES if wanted(a.model)}
    samplers = [name for name in SAMPLERS if wanted(name)]
    with tqdm(total=2 * len(models) + len(samplers), disable=None) as progress:

        def counted(what: Callable[[Any], Outcome], name: str, given: Any) -> Outcome:
            progress.set_description(name)
            outcome = attempt(what, given)
            progress.update()
            return outcome

        trained = {name: counted(train, name, architecture) for name, architecture in models.items()}
        halves = {
            name: counted(partial(train, dtype=torch.bfloat16), name, architecture)
            for name, architecture in models.items()
        }
        drawn = {name: counted(draw, name, name) for name in samplers}
    versions = f"transformers {transformers.__version__}, diffusers {diffusers.__version__}, torch {torch.__version__}"
    about = (
        f"Written by `make test-models`, with {versions}, on {xr.device_type()}. A model has a few thousand random "
        f"weights and no dropout, and is trained for {STEPS} steps with AdamW on both devices, each with a batch of "
        "its own; the difference is the largest of a loss, relative. In bfloat16 it is to the CPU's losses in float32, "
        "relative to the largest. A sampler draws an image twice in 8 steps; the difference is the largest of a pixel. "
        "Operators on the host are those whose result has a shape that depends on values."
    )
    text = "\n\n".join(
        [
            "# Models of other libraries",
            textwrap.fill(about, 120),
            table("Training steps", "first step", trained),
            table("Training steps in bfloat16", "first step", halves),
            table("Samplers", "first image", drawn),
        ]
    )
    if names:
        print(text)
    else:
        REPORT.write_text(text + "\n")
        print(f"written to {REPORT.relative_to(Path.cwd())}")
    rows = [*trained.items(), *((f"{name} in bfloat16", o) for name, o in halves.items()), *drawn.items()]
    failing = [name for name, outcome in rows if not outcome.passes()]
    print(f"{len(failing)} failing{': ' if failing else ''}{', '.join(failing)}")
    return int(bool(failing))


if __name__ == "__main__":
    sys.exit(main())
