"""What this package does on a GPU, beside PyTorch's own device for it, its compiler and hand-jitted JAX.

`PJRT_DEVICE=CUDA XLA_PYTHON_CLIENT_PREALLOCATE=false python -m benchmarks.accelerator [stage ...]` runs stages, each in
a process of its own, in the order given: a model's name compares its steps with eager and `torch.compile`, and
`MODEL:max-autotune` with that mode. `--all` runs every stage, the tests first, and leaves out what does not fit into
`--seconds`. `--dry-run` runs the same on the CPU with tiny models: it shows that the program works, its figures say
nothing. The sides of a comparison take turns on the same device; float32 products may use TF32 on every side, as JAX
has it by default.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from benchmarks.measures import Figures, timed

if TYPE_CHECKING:
    import torch

    from benchmarks.workloads import Workload

ROOT = Path(__file__).parent.parent
ROUNDS = 5
BLOCK_SECONDS = 0.5
SMALL = ("mlp", "resnet", "gpt2")
LARGE = ("gpt2_124m", "resnet50", "llama_blocks", "sd_unet")
TUNED = tuple(f"{name}:max-autotune" for name in LARGE)
# What is left out at the end for want of time is least missed.
STAGES = ("tests", *LARGE, "graph", "dlpack", *SMALL, *TUNED)
FOLDERS = ("record", "tensor", "cut", "run", "barrier", "device", "lower", "compile", "functions")
# Seconds of which a stage may take no more; the tests end in time to leave some for the rest.
LIMITS = {"tests": 210, "graph": 60, "dlpack": 45}
LIMIT = 120
# Seconds per step of so many pipelined steps, waited for at their end.
Block = Callable[[int], float]


class _Peer:
    """PyTorch's own device for the same hardware."""

    def __init__(self, dry: bool) -> None:
        import torch

        self.device = "cpu" if dry else "cuda"
        self._cuda = None if dry else torch.cuda

    def wait(self) -> None:
        """Waits until what was started has run."""
        if self._cuda is not None:
            self._cuda.synchronize()

    def memory(self) -> float:
        """Bytes in use, from where the peak is counted now; none are known of a CPU."""
        if self._cuda is None:
            return float("nan")
        self._cuda.empty_cache()
        self._cuda.reset_peak_memory_stats()
        return self._cuda.memory_allocated()

    def peak(self) -> float:
        """The most bytes that were in use since."""
        return float("nan") if self._cuda is None else self._cuda.max_memory_allocated()


def build(name: str, device: torch.device | str, small: bool) -> Workload:
    """The workload of that name on `device`."""
    from benchmarks import large_models, workloads

    if name in large_models.MODELS:
        return large_models.MODELS[name](device, small)
    return workloads.build(name, device)


def steps_of(name: str, mode: str | None, dry: bool) -> Figures:
    """First steps, pipelined steps in turns, the host's time for one, peak memory and the losses of the first step."""
    import torch

    import torch_xla
    import torch_xla.core.xla_model as xm
    from benchmarks.observe import pipelined
    from benchmarks.workloads import compile_in_place

    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True  # XLA chooses its convolutions by trying them, too
    figures: Figures = {}
    blocks: dict[str, Block] = {}

    ours = build(name, torch_xla.device(), dry)
    torch_xla.sync(wait=True)

    def our_step() -> None:
        loss = ours.step()
        torch_xla.sync()
        figures["loss"] = loss.item()

    figures["first_s"] = timed(our_step)
    blocks["step"] = lambda steps: pipelined(ours, steps)
    blocks["step"](3)
    figures["peak_mb"] = xm.get_memory_info()["peak_bytes_used"] / 1e6
    peer = _Peer(dry)

    def torch_side(key: str, mode: str | None) -> None:
        before = peer.memory()
        workload = build(name, peer.device, dry)
        if mode is not None:
            compile_in_place(workload.model, mode=mode)

        def block(steps: int) -> float:
            start = perf_counter()
            for _ in range(steps):
                workload.step()
            peer.wait()
            return (perf_counter() - start) / steps

        def host() -> float:
            seconds = timed(workload.step)
            peer.wait()
            return seconds

        def step() -> None:
            figures[f"{key}_loss"] = workload.step().item()

        figures[f"{key}_first_s"] = timed(step)
        block(3)
        figures[f"{key}_peak_mb"] = (peer.peak() - before) / 1e6
        figures[f"{key}_host_ms"] = median(host() for _ in range(10)) * 1e3
        blocks[key] = block

    torch_side("eager", None)
    torch_side("inductor", mode or "default")
    if name in SMALL:
        from benchmarks.jax_steps import STEPS

        hand = STEPS[name]()
        figures["jax_first_s"] = timed(lambda: hand.step().block_until_ready())
        blocks["jax"] = hand.pipelined

    counts = {}
    for key, block in blocks.items():
        block(3)
        counts[key] = 1 if dry else max(3, min(300, int(BLOCK_SECONDS / block(3))))
    rounds = [{key: block(counts[key]) for key, block in blocks.items()} for _ in range(ROUNDS)]
    for key in blocks:
        figures[f"{key}_ms"] = median(turn[key] for turn in rounds) * 1e3
        if key != "step":
            figures[f"step/{key}"] = median(turn["step"] / turn[key] for turn in rounds)
    host = []
    for _ in range(min(50, max(5, counts["step"]))):
        start = perf_counter()
        loss = ours.step()
        torch_xla.sync()
        host.append(perf_counter() - start)
        xm.wait_device_ops()
    assert loss.device.type == "xla"
    figures["host_ms"] = median(host) * 1e3
    return figures


def graph(dry: bool) -> Figures:
    """A small step and a decoder's token captured and replayed, beside recorded and hand-jitted ones."""
    from benchmarks import graphs

    return {**graphs.figures("mlp", 8 if dry else 100), **graphs.figures("gru", 20 if dry else 500)}


def dlpack(dry: bool) -> Figures:
    """A tensor of 256 MiB to PyTorch's own device and back, by DLPack: values are compared, copies are timed."""
    import torch

    import torch_xla
    from torch_xla.utils import dlpack

    peer = _Peer(dry)
    elements = 2**12 if dry else 2**26
    theirs = torch.arange(elements, dtype=torch.float32, device=peer.device)
    seconds: dict[str, list[float]] = {"from": [], "to": []}
    for _ in range(ROUNDS):
        start = perf_counter()
        ours = dlpack.from_dlpack(theirs)
        torch_xla.sync(wait=True)
        seconds["from"].append(perf_counter() - start)
        doubled = ours * 2
        torch_xla.sync(wait=True)
        start = perf_counter()
        back = torch.utils.dlpack.from_dlpack(dlpack.to_dlpack(doubled))
        peer.wait()
        seconds["to"].append(perf_counter() - start)
        assert back.device.type == peer.device and torch.equal(back, theirs * 2)
    for dtype in (torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool):
        source = torch.tensor([[0, 1, 1], [1, 0, 1]], dtype=dtype, device=peer.device)
        there = dlpack.from_dlpack(source)
        assert there.dtype == dtype and torch.equal(there.cpu(), source.cpu())
        assert torch.equal(torch.utils.dlpack.from_dlpack(dlpack.to_dlpack(there)), source)
    start = perf_counter()
    copy = theirs.clone()
    peer.wait()
    own = perf_counter() - start
    assert torch.equal(copy, theirs)
    return {
        "from_ms": median(seconds["from"]) * 1e3,
        "to_ms": median(seconds["to"]) * 1e3,
        "clone_ms": own * 1e3,
    }


def tests(dry: bool, limit: float) -> Figures:
    """The tests of one device on this one: how many pass, and a list of what fails, by its reason.

    Raises:
        RuntimeError: They could not be run.
    """
    folders = ["tests/lower"] if dry else [f"tests/{folder}" for folder in FOLDERS]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not sweep", f"--junitxml={report}"]
        command += ["-p", "no:cacheprovider", "--timeout=120", f"--session-timeout={limit}", *folders]
        if importlib.util.find_spec("xdist") is not None:
            command += ["-n", str(max(1, min(12, (os.cpu_count() or 2) - 2))), "--dist", "loadfile"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if not report.is_file():
            said = done.stdout[-2000:]
            raise RuntimeError(f"[benchmarks] pytest ended with {done.returncode} and no report:\n{said}")
        cases = ElementTree.parse(report).getroot().iter("testcase")
        return _summary(list(cases))


def _summary(cases: list[ElementTree.Element]) -> Figures:
    found: Counter[str] = Counter()
    failures: dict[str, list[str]] = {}
    for case in cases:
        bad = next((child for kind in ("failure", "error") if (child := case.find(kind)) is not None), None)
        if bad is not None:
            found["failed"] += 1
            reason = re.sub(r"0x[0-9a-f]+|\d+(\.\d+)?", "N", bad.get("message", "").split("\n", 1)[0])[:160]
            failures.setdefault(reason, []).append(f"{case.get('classname')}.{case.get('name')}")
        else:
            found["skipped" if case.find("skipped") is not None else "passed"] += 1
    for reason, names in sorted(failures.items(), key=lambda pair: -len(pair[1])):
        print(f"{len(names):>5} {reason}", file=sys.stderr)
        for name in names:
            print(f"        {name}", file=sys.stderr)
    return {kind: float(found[kind]) for kind in ("passed", "failed", "skipped")}


def run(stage: str, dry: bool, limit: float) -> Figures:
    """The figures of one stage, in this process."""
    if stage == "tests":
        return tests(dry, limit)
    if stage == "graph":
        return graph(dry)
    if stage == "dlpack":
        return dlpack(dry)
    name, _, mode = stage.partition(":")
    return steps_of(name, mode or None, dry)


def missing(stage: str) -> str | None:
    """What a stage needs that is not installed."""
    name = stage.partition(":")[0]
    needs = {"sd_unet": ("diffusers",), "tests": ("pytest", "pytest_timeout", "hypothesis", "expecttest")}.get(name, ())
    needs += ("transformers",) if name in LARGE or name == "gpt2" else ()
    return next((need for need in needs if importlib.util.find_spec(need) is None), None)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", help=f"of {', '.join(STAGES)}; by default the models")
    parser.add_argument("--all", action="store_true", help="every stage")
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with tiny models")
    parser.add_argument("--seconds", type=float, default=570, help="for all of them; what does not fit is left out")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(run(options.one, options.dry_run, options.seconds)))
        return 0
    stages = STAGES if options.all else options.stages or (*LARGE, *SMALL)
    if unknown := set(stages) - set(STAGES):
        parser.error(f"unknown stages {sorted(unknown)}; there are {', '.join(STAGES)}")
    environment = dict(os.environ)
    if options.dry_run:
        environment |= {"PJRT_DEVICE": "CPU", "XLA_HOST_COMPUTE": "reads"}
    start = perf_counter()
    failed = 0
    for stage in stages:
        left = options.seconds - (perf_counter() - start)
        limit = min(left, LIMITS.get(stage, LIMIT))
        needed = missing(stage)
        if needed is not None or limit < 20:
            print(f"-- {stage}: left out, {needed + ' is not installed' if needed else 'no time is left'}", flush=True)
            failed = 1
            continue
        # A stage ends itself in time where it can, and else is ended.
        command = [sys.executable, "-m", "benchmarks.accelerator", "--one", stage, f"--seconds={limit - 15:.0f}"]
        command += ["--dry-run"] if options.dry_run else []
        began = perf_counter()
        try:
            result = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=limit
            )
            problem = f"failed with status {result.returncode}" if result.returncode else ""
        except subprocess.TimeoutExpired:
            problem = f"took more than {limit:.0f} s"
        print(f"-- {stage} ({perf_counter() - began:.0f} s) {problem}", flush=True)
        if problem:
            failed = 1
            continue
        for key, value in json.loads(result.stdout.splitlines()[-1]).items():
            print(f"{key:<22} {value:>10.3f}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
