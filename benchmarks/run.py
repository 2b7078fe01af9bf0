"""Prints every figure beside its target and writes them to benchmarks/results/<machine>.json.

`python -m benchmarks.run [measurement ...]` takes them all, in an hour on two cores, or those named. `steps` (25
minutes), `others` (20), `generate` (20), `decode` (4), `new`, `ragged` and `reads` (3 each) are groups. PJRT_DEVICE
chooses the device.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import perf_counter

from benchmarks import changing, reads
from benchmarks.measures import MEASURES, Figures
from benchmarks.sides import OTHERS, WORKLOADS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# Cores that other programs may use during a measurement before it counts as disturbed.
QUIET = 0.15
GROUPS = {"steps": list(WORKLOADS), "others": list(OTHERS)} | {
    group: [name for name in MEASURES if name.startswith(f"{group}_")]
    for group in ("new", "ragged", "generate", "decode", "reads")
}
RELATIONS: dict[str, Callable[[float, float], bool]] = {"<=": operator.le, "<": operator.lt, "=": operator.eq}


@dataclass(frozen=True)
class Line:
    """One line of the table: a figure's key, words, unit, and its target if it has one."""

    key: str
    words: str
    unit: str = ""
    relation: str = "<="
    target: float | None = None

    def met(self, value: float) -> bool | None:
        return None if self.target is None else RELATIONS[self.relation](value, self.target)

    def show(self, value: float) -> str:
        target = "" if self.target is None else f"{self.relation} {self.target:g}"
        verdict = {None: "", True: "ok", False: "MISSED"}[self.met(value)]
        return f"{self.words:<66} {value:>10.3f} {self.unit:<3} {target:<8} {verdict}".rstrip()


def each(key: str, words: str, unit: str = "", names: Iterable[str] = WORKLOADS, **target: object) -> list[Line]:
    """The same line for several workloads."""
    return [Line(f"{name}_{key}", f"{words} {(WORKLOADS | OTHERS)[name]}", unit, **target) for name in names]  # type: ignore[arg-type]


LINES = [
    *(Line(f"record_{op}_us", f"recording one {op}", "us", target=1.2) for op in ("add", "mm", "relu", "add_")),
    Line("mlp_record_ratio", "recording step (a) / torch eager executing it", target=0.75),
    Line("gpt2_record_ratio", "recording step (c) / torch eager executing it", target=0.08),
    Line("mlp_sync_ms", "sync() of a cached graph, host time, (a)", "ms", target=0.5),
    Line("sync_empty_us", "sync() with nothing pending", "us", target=5.0),
    *each("compiles", "compiles over all steps", relation="=", target=1.0),
    *each("lowering_ratio", "lowering / XLA compile time", names=("resnet", "gpt2"), target=0.25),
    *each("step_ratio", "pipelined step / max(recording, hand-jitted JAX)", target=1.15),
    *each("best_ratio", "pipelined step / the better of eager and torch.compile", target=1.0),
    *each("best_ratio", "pipelined step / the better of eager and torch.compile", names=OTHERS, target=1.05),
    Line("gpt2_first_step_s", "first step of (c), wall", "s", target=4.0),
    *(
        each(
            "openxla_ratio", "host time of a step, openxla / lazy", names=[name], target=1.0 if name == "unet" else 1.2
        )[0]
        for name in WORKLOADS
    ),
    *each("frames_ratio", "recording with the user's lines / without", names=("mlp", "gpt2"), target=1.15),
    *each("profile_ratio", "step under debug.profile() / without", names=("mlp", "gpt2"), target=1.3),
    *(
        Line(f"{name}_graph_ratio", f"replay of {words} / hand-jitted JAX", target=1.3)
        for name, words in (("mlp", "a captured step (a)"), ("gru", "a captured token of a GRU decoder"))
    ),
    Line("report_mb", "profile report of 200 steps of (a)", "MB", target=2.0),
    Line("import_s", "import torch_xla beyond import torch", "s", target=0.3),
    Line("import_threads", "threads that the import starts", relation="=", target=0.0),
    Line("import_jax", "JAX loaded by the import (no client without it)", relation="=", target=0.0),
    Line("memory_growth_percent", "growth of resident memory over 2,000 steps of (a)", "%", "<", 2.0),
    Line("memory_buffer_growth", "growth of live device buffers over them", relation="=", target=0.0),
    *(Line(*row) for row in changing.lines()),
    *(Line(*row) for row in reads.lines()),
]

COMPARISONS = [
    *each("record_ms", "recording a step", "ms"),
    *each("step_ms", "pipelined step, torch_xla", "ms"),
    *each("openxla_step_ms", "pipelined step, torch_xla's backend openxla", "ms"),
    *each("openxla_record_ms", "recording a step, openxla", "ms"),
    *each("sync_ms", "sync() of a cached graph, host time", "ms", names=list(WORKLOADS)[1:]),
    *each("openxla_sync_ms", "sync() of a cached graph, host time, openxla", "ms"),
    *each("jax_step_ms", "pipelined step, hand-jitted JAX", "ms"),
    *each("step_ms", "pipelined step, torch_xla", "ms", names=OTHERS),
    *each("eager_step_ms", "step, torch eager CPU", "ms", names=[*WORKLOADS, *OTHERS]),
    *each("inductor_step_ms", "step, torch.compile CPU", "ms", names=[*WORKLOADS, *OTHERS]),
    *each("spread", "slowest / fastest turn - 1, torch_xla"),
    *each("openxla_spread", "slowest / fastest turn - 1, openxla"),
    *each("jax_spread", "slowest / fastest turn - 1, hand-jitted JAX"),
    *each("eager_spread", "slowest / fastest turn - 1, torch eager"),
    *each("inductor_spread", "slowest / fastest turn - 1, torch.compile"),
    *each("first_step_s", "first step, torch_xla", "s"),
    *each("openxla_first_step_s", "first step, openxla", "s"),
    *each("jax_first_step_s", "first step, hand-jitted JAX", "s"),
    *each("eager_first_step_s", "first step, torch eager CPU", "s"),
    *each("inductor_first_step_s", "first step, torch.compile CPU", "s"),
    *each("lowering_s", "lowering", "s"),
    *each("compile_s", "XLA compile", "s"),
    Line("report_save_s", "writing that report", "s"),
    Line("memory_mb", "resident memory after them", "MB"),
    Line("memory_buffers", "live device buffers after them"),
    *(Line(*row) for row in changing.comparisons()),
    *(Line(*row) for row in reads.comparisons()),
]


def busy_seconds() -> float:
    """Processor seconds that the whole machine has spent working since it started."""
    user, nice, system, _, _, interrupt, soft, *_ = map(int, Path("/proc/stat").read_text().split("\n")[0].split()[1:])
    return (user + nice + system + interrupt + soft) / os.sysconf("SC_CLK_TCK")


def children_seconds() -> float:
    """Processor seconds of this process's finished children."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def take(name: str) -> tuple[Figures, float]:
    """Runs one measurement in a fresh process; its failure is printed and leaves its lines out.

    Returns:
        The figures, and how many cores other programs used meanwhile. OpenMP's barriers make torch eager many times
        slower on a busy machine, which would flatter every ratio against it.
    """
    start, busy, own = perf_counter(), busy_seconds(), children_seconds()
    result = subprocess.run(
        [sys.executable, "-m", "benchmarks.measures", name], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=1800
    )
    others = (busy_seconds() - busy - children_seconds() + own) / (perf_counter() - start)
    if result.returncode:
        print(f"measurement {name} failed with status {result.returncode}", file=sys.stderr)
        return {}, others
    return json.loads(result.stdout.splitlines()[-1]), others


def machine() -> dict[str, str]:
    """What the figures were taken on."""
    kind = subprocess.run(
        [
            sys.executable,
            "-c",
            "import torch, torch_xla, jax; torch.ones(1).to('xla'); print(jax.devices()[0].device_kind)",
        ],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.splitlines()[-1]
    cores = len(os.sched_getaffinity(0))
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    packages = {}
    for package in ("torch", "jax", "jaxlib", "torch_xla"):
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = "not installed"
    return {
        "device": kind,
        "cpu": f"{cores} x {model[1] if model else platform.machine()}",
        "python": platform.python_version(),
        **packages,
        "name": f"cpu-{cores}-cores" if kind.lower() == "cpu" else re.sub(r"[^a-z0-9]+", "-", kind.lower()).strip("-"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measurements", nargs="*", help=f"of {', '.join([*GROUPS, *MEASURES])}; all by default")
    words = parser.parse_args().measurements or list(MEASURES)
    names = list(dict.fromkeys(name for word in words for name in GROUPS.get(word, [word])))
    if unknown := set(names) - set(MEASURES):
        parser.error(f"unknown measurements {sorted(unknown)}; there are {', '.join([*GROUPS, *MEASURES])}")

    where = machine()
    print(f"{where['device']}, {where['cpu']}, torch {where['torch']}, jax {where['jax']}\n")
    figures: Figures = {}
    disturbed: dict[str, float] = {}
    for name in names:
        taken, others = take(name)
        figures |= taken
        if others > QUIET:
            disturbed[name] = round(others, 2)
    for title, lines in (("figures", LINES), ("for comparison", COMPARISONS)):
        print(f"-- {title}")
        for line in lines:
            if line.key in figures:
                print(line.show(figures[line.key]))
        print()

    if disturbed:
        print(
            f"other programs used the machine, take these again: {disturbed} cores; nothing is written", file=sys.stderr
        )
        return 1
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{where['name']}.json"
    known = json.loads(path.read_text())["figures"] if path.exists() and len(names) < len(MEASURES) else {}
    targets = {line.key: f"{line.relation} {line.target:g}" for line in LINES}
    path.write_text(json.dumps({"machine": where, "figures": known | figures, "targets": targets}, indent=1) + "\n")
    print(f"written to {path.relative_to(ROOT)}")
    missing = [line.key for line in LINES if line.key not in figures]
    if missing and len(names) == len(MEASURES):
        print(f"no figure for {', '.join(missing)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
