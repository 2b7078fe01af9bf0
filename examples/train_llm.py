"""Trains a small Llama from transformers on Python's own documentation strings, byte by byte, on device xla.

Prints the loss, tokens per second and the share of the device's peak, and draws the loss curve. A checkpoint is a
folder that transformers loads, with the optimizer's state beside it; ``--resume`` goes on from the latest, on any
number of processes.

Examples::

    python examples/train_llm.py --steps 600 --checkpoint demo-output/llm
    python examples/train_llm.py --steps 900 --checkpoint demo-output/llm --resume --bf16 --accumulate 2
    CPU_NUM_DEVICES=2 PJRT_DEVICE=CPU python examples/train_llm.py --fsdp --steps 100
    CPU_NUM_DEVICES=8 PJRT_DEVICE=CPU python examples/train_llm.py --spmd fsdp=4,tensor=2 --steps 100
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

if __package__:
    from examples import common, llm_checkpoint, llm_data, llm_splits
else:
    import common
    import llm_checkpoint
    import llm_data
    import llm_splits

if TYPE_CHECKING:
    from transformers import LlamaConfig


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=common.positive, default=600)
    parser.add_argument(
        "--batch-size", type=common.positive, default=8, help="sequences of a step, of all processes together"
    )
    parser.add_argument(
        "--accumulate", type=common.positive, default=1, help="parts of a step that are computed one by one"
    )
    parser.add_argument("--sequence", type=common.positive, default=256, help="bytes of a sequence")
    parser.add_argument("--hidden", type=common.positive, default=192)
    parser.add_argument("--layers", type=common.positive, default=4)
    parser.add_argument("--heads", type=common.positive, default=6)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16")
    parser.add_argument("--fsdp", action="store_true", help="parameters split over all devices, a process each")
    parser.add_argument("--spmd", metavar="AXES", help="one process for all devices, such as fsdp=4,tensor=2")
    parser.add_argument("--checkpoint", type=Path, help="folder for checkpoints")
    parser.add_argument("--every", type=common.positive, default=200, help="steps between checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the latest checkpoint")
    parser.add_argument("--characters", type=common.positive, help="how much of the text to use, all by default")
    parser.add_argument("--plot", type=Path, default=Path("demo-output/train_llm.png"))
    common.add_peers(parser)
    options = parser.parse_args(arguments)
    if options.spmd:
        llm_splits.axes_of(options.spmd)
    if options.spmd and options.fsdp:
        common.refuse("--spmd is one process for all devices, and --fsdp one for each; leave one of them out")
    if options.resume and options.checkpoint is None:
        common.refuse("--resume needs --checkpoint, the folder to go on from")
    if options.hidden % options.heads or options.hidden // options.heads % 2:
        common.refuse(
            f"got --hidden {options.hidden} and --heads {options.heads}, expected an even share for each head"
        )
    check_batch(options, 1)
    return options


def check_batch(options: argparse.Namespace, shares: int) -> None:
    """Ends the program where a batch cannot be dealt out to so many devices."""
    if options.batch_size % (shares * options.accumulate):
        common.refuse(
            f"got --batch-size {options.batch_size}, expected a multiple of {shares * options.accumulate} "
            f"(devices: {shares}, --accumulate: {options.accumulate})"
        )


def rate_at(step: int, options: argparse.Namespace) -> float:
    """The share of the learning rate: a short rise, then a cosine down to a tenth."""
    rise = max(1, min(50, options.steps // 10))
    if step < rise:
        return (step + 1) / rise
    done = (step - rise) / max(1, options.steps - rise)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, done)))


def config_of(options: argparse.Namespace) -> LlamaConfig:
    """The model that the options describe."""
    return llm_data.config_of(options.hidden, options.layers, options.heads, options.sequence)


class Trainer:
    """The model on a device, split over a mesh if there is one, its optimizer and schedule, and a step."""

    def __init__(
        self,
        options: argparse.Namespace,
        device: torch.device | str,
        compiled: bool = False,
        mesh: xs.Mesh | None = None,
    ) -> None:
        self.options, self.device = options, torch.device(device)
        self.model: nn.Module = llm_data.build(config_of(options)).to(device)
        if options.fsdp:
            _split(self.model)
        if mesh is not None:
            llm_splits.split_model(self.model, mesh)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: rate_at(step, options))
        self.network: Callable[..., Any] = torch.compile(self.model) if compiled else self.model

    def step(self, tokens: Tensor) -> Tensor:
        """A step with a batch, in as many parts as were asked for; gives the mean loss."""
        self.optimizer.zero_grad()
        total = torch.zeros((), device=self.device)
        for part in tokens.chunk(self.options.accumulate):
            casting = torch.autocast(self.device.type, torch.bfloat16) if self.options.bf16 else nullcontext()
            with casting:
                loss = self.network(input_ids=part, labels=part).loss / self.options.accumulate
            loss.backward()
            total = total + loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return total


def _split(model: nn.Module) -> None:
    """Splits the parameters over all processes, a layer at a time."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import torch_xla.distributed.xla_backend  # noqa: F401  (registers backend "xla")

    if not dist.is_initialized():
        dist.init_process_group("xla", init_method="xla://")
    mesh = init_device_mesh("xla", (xr.world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def flops_per_token(model: nn.Module, options: argparse.Namespace) -> float:
    """Floating-point operations of a training step for each token: products with weights, and attention."""
    return 6 * common.parameters_of(model) + 12 * options.layers * options.hidden * options.sequence


def peak_flops(device: torch.device, bf16: bool) -> float:
    """What the device reaches with a product of large matrices, measured here."""
    dtype = torch.bfloat16 if bf16 else torch.float32
    size, count = 1024, 4
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    torch_xla.sync()  # they are no part of what is timed

    def products() -> Tensor:
        x = a
        for _ in range(count):
            x = torch.mm(x, b)
        return x

    return 2 * size**3 * count / common.seconds_per_step(products, device, seconds=1.0)


def train(index: int, options: argparse.Namespace) -> list[float]:
    """What each process runs; gives the losses, which are the mean of all processes'."""
    mesh = llm_splits.mesh_of(options.spmd) if options.spmd else None
    if mesh is not None:
        check_batch(options, llm_splits.share_of(mesh))
    device, world = torch_xla.device(), xr.world_size()
    trainer = Trainer(options, device, mesh=mesh)
    first = 0
    if options.resume:
        first = llm_checkpoint.load(options.checkpoint, trainer.model, trainer.optimizer, trainer.schedule)
        torch_xla.sync()  # what was read is no part of a step
        xm.master_print(f"going on from step {first}")
    tokens = llm_data.encode(llm_data.documentation(options.characters))
    if len(tokens) <= options.sequence:
        common.refuse(f"got --sequence {options.sequence}, expected fewer than the {len(tokens)} bytes of the text")
    source = llm_data.batches(tokens, options.batch_size, options.sequence, seed=1, start=first)
    work = flops_per_token(trainer.model, options)
    xm.master_print(f"{common.parameters_of(trainer.model):,} parameters, {len(tokens):,} bytes of text, on {device}")
    losses: list[Tensor] = []
    read: list[float] = []
    graphs = common.compiles()
    began, warm = time.perf_counter(), first
    own = slice(xr.global_ordinal(), None, world)
    for step in range(first, options.steps):
        batch = next(source)[own].to(device)
        losses.append(trainer.step(batch if mesh is None else llm_splits.split_batch(batch, mesh)))
        torch_xla.sync()
        if step == first + 1:  # what is compiled is compiled
            torch_xla.sync(wait=True)
            began, warm = time.perf_counter(), step + 1
        if (step + 1) % 50 == 0 or step + 1 == options.steps:
            mean = torch.stack(losses).cpu()
            losses.clear()
            if world > 1:
                mean = xm.mesh_reduce("loss", mean, lambda all_: torch.stack(all_).mean(0))
            read += mean.tolist()
            xm.master_print(f"step {step + 1}: loss {read[-1]:.3f}")
        if options.checkpoint is not None and ((step + 1) % options.every == 0 or step + 1 == options.steps):
            llm_checkpoint.save(options.checkpoint, step + 1, trainer.model, trainer.optimizer, trainer.schedule)
    torch_xla.sync(wait=True)
    rate = (options.steps - warm) * options.batch_size * options.sequence / max(1e-9, time.perf_counter() - began)
    graphs = common.compiles() - graphs
    share = rate * work / (peak_flops(device, options.bf16) * (world if mesh is None else mesh.size()))
    xm.master_print(
        f"{rate:,.0f} tokens/s, {share:.0%} of what large products reach here; {common.graphs(graphs)} compiled"
    )
    if read and xr.global_ordinal() == 0:
        common.draw_curve(read, range(first + 1, first + 1 + len(read)), "Llama on docstrings", options.plot)
        print(f"loss {sum(read[-20:]) / len(read[-20:]):.3f}, curve: {options.plot}")
    return read


def compare(options: argparse.Namespace) -> None:
    """Times a step beside PyTorch's own on the CPU."""
    tokens = llm_data.encode(llm_data.documentation(200_000))
    batch = next(llm_data.batches(tokens, options.batch_size, options.sequence, seed=1))

    def build(device: str, compiled: bool) -> Callable[[], object]:
        trainer = Trainer(options, device, compiled)
        moved = batch.to(device)
        return lambda: trainer.step(moved)

    common.compare_with_peers(options.peers, {"a step": build})


def main() -> int:
    """Starts the processes, if there are several."""
    options = parse()
    if options.peers:
        compare(options)
        return 0
    if options.resume:  # what cannot be done is told here, once
        path = llm_checkpoint.latest(options.checkpoint)
        if path is None:
            common.refuse(f"there is no checkpoint in {options.checkpoint}; leave --resume out to start")
        llm_checkpoint.check_shape(path, config_of(options))
        if llm_checkpoint.steps_of(path) >= options.steps:
            common.refuse(f"got --steps {options.steps}, expected more than those that {path} has")
    if options.fsdp:
        check_batch(options, max(xr.world_size(), xr.global_runtime_device_count()))
        torch_xla.launch(train, (options,))
    else:
        train(0, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
