"""Training steps on a GPU: this package beside PyTorch's own device for it, its compiler and hand-jitted JAX.

`PJRT_DEVICE=CUDA XLA_PYTHON_CLIENT_PREALLOCATE=false python -m benchmarks.accelerator [workload ...]` prints a table of
ratios; each workload has a process of its own, in which the sides take turns on the same device. Float32 products may
use TF32 on every side, as JAX has it by default.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from benchmarks.measures import timed

if TYPE_CHECKING:
    import torch

    from benchmarks.workloads import Workload

ROUNDS = 5
BLOCK_SECONDS = 0.5
# Seconds per step of so many pipelined steps, waited for at their end.
Block = Callable[[int], float]


def gpt2_124m(device: torch.device | str) -> Workload:
    """GPT-2 as it was published (12 layers, width 768), bfloat16 by autocast, AdamW, 8 sequences of 1,024 tokens."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    from benchmarks import workloads

    torch.manual_seed(0)
    config = GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    batches = [(torch.randint(0, 50257, (8, 1024)).to(device),) for _ in range(4)]
    kind = torch.device(device).type

    def loss_of(net: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        with torch.autocast(kind, torch.bfloat16):
            loss: torch.Tensor = net(input_ids=tokens, labels=tokens).loss
        return loss

    return workloads.training("gpt2_124m", model, optimizer, batches, loss_of)


def resnet50(device: torch.device | str) -> Workload:
    """ResNet-50 in bfloat16 by autocast, SGD with momentum, 64 images of 224x224."""
    import torch
    from transformers import ResNetConfig, ResNetForImageClassification

    from benchmarks import workloads

    torch.manual_seed(0)
    model = ResNetForImageClassification(ResNetConfig(num_labels=1000)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    batches = [(torch.randn(64, 3, 224, 224).to(device), torch.randint(0, 1000, (64,)).to(device)) for _ in range(2)]
    kind = torch.device(device).type

    def loss_of(net: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.autocast(kind, torch.bfloat16):
            return torch.nn.functional.cross_entropy(net(images).logits, labels)

    return workloads.training("resnet50", model, optimizer, batches, loss_of)


LARGE: dict[str, Callable[[torch.device | str], Workload]] = {"gpt2_124m": gpt2_124m, "resnet50": resnet50}
SMALL = ("mlp", "resnet", "gpt2")


def build(name: str, device: torch.device | str) -> Workload:
    """The workload of that name on `device`."""
    from benchmarks import workloads

    return LARGE[name](device) if name in LARGE else workloads.build(name, device)


def measure(name: str, compiled: bool) -> dict[str, float]:
    """First steps, pipelined steps in turns, the host's share of ours, and the losses of the first step."""
    import torch

    import torch_xla
    import torch_xla.core.xla_model as xm
    from benchmarks.observe import pipelined

    torch.set_float32_matmul_precision("high")
    figures: dict[str, float] = {}
    blocks: dict[str, Block] = {}

    ours = build(name, torch_xla.device())
    torch_xla.sync(wait=True)

    def our_step() -> None:
        loss = ours.step()
        torch_xla.sync()
        figures["loss"] = loss.item()

    figures["first_s"] = timed(our_step)
    blocks["step"] = lambda steps: pipelined(ours, steps)

    def torch_side(key: str, workload: Workload) -> None:
        def block(steps: int) -> float:
            start = perf_counter()
            for _ in range(steps):
                workload.step()
            torch.cuda.synchronize()
            return (perf_counter() - start) / steps

        def step() -> None:
            figures[f"{key}_loss"] = workload.step().item()

        figures[f"{key}_first_s"] = timed(step)
        blocks[key] = block

    torch_side("eager", build(name, "cuda"))
    if compiled:
        workload = build(name, "cuda")
        workload.model = torch.compile(workload.model)  # type: ignore[assignment]
        torch_side("inductor", workload)
    if name in SMALL:
        from benchmarks.jax_steps import STEPS

        hand = STEPS[name]()
        figures["jax_first_s"] = timed(lambda: hand.step().block_until_ready())
        blocks["jax"] = hand.pipelined

    counts = {}
    for key, block in blocks.items():
        block(3)
        counts[key] = max(3, min(300, int(BLOCK_SECONDS / block(3))))
    rounds = [{key: block(counts[key]) for key, block in blocks.items()} for _ in range(ROUNDS)]
    for key in blocks:
        figures[f"{key}_ms"] = median(turn[key] for turn in rounds) * 1e3
        if key != "step":
            figures[f"step/{key}"] = median(turn["step"] / turn[key] for turn in rounds)
    host = []
    for _ in range(min(50, counts["step"])):
        start = perf_counter()
        loss = ours.step()
        torch_xla.sync()
        host.append(perf_counter() - start)
        xm.wait_device_ops()
    assert loss.device.type == "xla"
    figures["host_ms"] = median(host) * 1e3
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [*SMALL, *LARGE]
    parser.add_argument("workloads", nargs="*", help=f"of {', '.join(names)}; all by default")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out: it takes a minute each")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, not options.no_compile)))
        return 0
    if unknown := set(options.workloads) - set(names):
        parser.error(f"unknown workloads {sorted(unknown)}; there are {', '.join(names)}")
    failed = 0
    for name in options.workloads or names:
        command = [sys.executable, "-m", "benchmarks.accelerator", "--one", name]
        result = subprocess.run(
            [*command, *(["--no-compile"] if options.no_compile else [])],
            cwd=Path(__file__).parent.parent,
            stdout=subprocess.PIPE,
            text=True,
            timeout=1800,
        )
        if result.returncode:
            print(f"{name}: failed with status {result.returncode}", file=sys.stderr)
            failed = 1
            continue
        print(f"-- {name}")
        for key, value in json.loads(result.stdout.splitlines()[-1]).items():
            print(f"{key:<18} {value:>10.3f}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
