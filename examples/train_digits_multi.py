"""Trains the digits network on all devices of this host, or of a job that ``torchrun`` starts.

The global batch is the same whatever the number of processes, and so is the loss. Ways to train, by ``--how``:

* ``xm``: `optimizer_step` averages the gradients;
* ``ddp``: PyTorch's `DistributedDataParallel`;
* ``fsdp2``: PyTorch's `fully_shard`;
* ``xla_fsdp``: `XlaFullyShardedDataParallel`;
* ``zero1``: the optimizer's state is split;
* ``data_parallel``: threads of one process, one per device.

Examples::

    CPU_NUM_DEVICES=2 PJRT_DEVICE=CPU python examples/train_digits_multi.py
    PJRT_DEVICE=CPU torchrun --nproc-per-node 2 examples/train_digits_multi.py --how xla_fsdp
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_backend  # noqa: F401  (registers backend "xla")
import torch_xla.runtime as xr
from torch_xla.distributed.data_parallel import Context, DataParallel
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel
from torch_xla.distributed.parallel_loader import MpDeviceLoader
from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

if __package__:
    from examples import common
    from examples.digits import DigitsNet, load_data
else:
    import common
    from digits import DigitsNet, load_data

HOW = ("xm", "ddp", "fsdp2", "xla_fsdp", "zero1", "data_parallel")
Step = Callable[[], object]


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", choices=HOW, default="xm")
    parser.add_argument("--epochs", type=common.positive, default=5)
    parser.add_argument("--steps", type=int, default=0, help="steps of an epoch, all by default")
    parser.add_argument("--batch-size", type=common.positive, default=64, help="of all devices together")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--save", type=Path, help="where to save the model")
    return parser.parse_args(arguments)


def sgd(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    """The optimizer."""
    return torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9)


def set_up(options: argparse.Namespace) -> tuple[nn.Module, torch.optim.Optimizer, Step]:
    """The model on this process's device, its optimizer, and what a step does after the backward pass."""
    torch.manual_seed(0)  # the same parameters in each process
    model: nn.Module = DigitsNet()
    if options.how in ("ddp", "fsdp2") and not dist.is_initialized():
        dist.init_process_group("xla", init_method="xla://")
    model = XlaFullyShardedDataParallel(model) if options.how == "xla_fsdp" else model.to("xla")
    if options.how == "ddp":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if options.how == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("xla", (xr.world_size(),)))
    if options.how == "zero1":
        optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.SGD, lr=options.learning_rate, momentum=0.9, grad_clipping=False
        )
    else:
        optimizer = sgd(model, options)
    # The others have averaged the gradients in the backward pass, or do so in the optimizer.
    step = (lambda: xm.optimizer_step(optimizer)) if options.how == "xm" else optimizer.step
    return model, optimizer, step


def run_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, step: Step, batches: Iterable[Any]) -> Tensor:
    """One pass over the batches of a device; gives the mean of the losses there."""
    loss_of = nn.CrossEntropyLoss()
    losses = []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = loss_of(model(images), labels)
        loss.backward()
        step()
        losses.append(loss.detach())
    return torch.stack(losses).mean()


def train(index: int, options: argparse.Namespace) -> float:
    """What each process runs; gives the mean loss of the last epoch, which all have."""
    world = xr.world_size()
    train_data, _ = load_data()
    if options.steps:
        train_data = torch.utils.data.Subset(train_data, range(options.steps * options.batch_size))
    sampler = DistributedSampler(train_data, world, xr.global_ordinal(), seed=0, drop_last=True)
    host_loader = DataLoader(train_data, options.batch_size // world, sampler=sampler, drop_last=True)
    loader = MpDeviceLoader(host_loader, torch_xla.device())
    model, optimizer, step = set_up(options)
    mean = 0.0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        loss = run_epoch(model, optimizer, step, loader)
        mean = xm.mesh_reduce("loss", loss.item(), sum) / world
        xm.master_print(f"epoch {epoch + 1}: loss {mean:.5f} with {world} processes ({options.how})")
    if options.save is not None:
        state = model.state_dict()
        if options.how == "xla_fsdp":
            shard = {"model": state, "shard_metadata": model.get_shard_metadata()}
            xm.save(shard, f"{options.save}_rank-{xr.global_ordinal()}.pth", master_only=False)
        else:
            xm.save(state, options.save)
        xm.rendezvous("saved")
    return mean


def train_in_threads(options: argparse.Namespace) -> float:
    """The same in one process, with a thread for each of its devices."""
    torch.manual_seed(0)
    devices = xm.get_xla_supported_devices()
    train_data, _ = load_data()
    if options.steps:
        train_data = torch.utils.data.Subset(train_data, range(options.steps * options.batch_size))
    # A batch of one device after the other, as the processes' samplers deal out samples.
    sampler = DistributedSampler(train_data, 1, 0, seed=0, drop_last=True)
    loader = DataLoader(train_data, options.batch_size // len(devices), sampler=sampler, drop_last=True)
    parallel = DataParallel(DigitsNet, devices)

    def loop(model: nn.Module, batches: Iterable[Any], device: torch.device, context: Context) -> float:
        optimizer = context.getattr_or("optimizer", lambda: sgd(model, options))
        return run_epoch(model, optimizer, lambda: xm.optimizer_step(optimizer), batches).item()

    mean = 0.0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        mean = sum(parallel(loop, loader)) / len(devices)
        print(f"epoch {epoch + 1}: loss {mean:.5f} with {len(devices)} threads")
    return mean


def main() -> None:
    """Starts the processes, unless ``torchrun`` has."""
    options = parse()
    count = max(xr.world_size(), xr.global_runtime_device_count())
    if options.batch_size % count:
        common.refuse(f"got --batch-size {options.batch_size}, expected a multiple of {count}, the number of devices")
    if options.how == "data_parallel":
        train_in_threads(options)
    else:
        torch_xla.launch(train, (options,))


if __name__ == "__main__":
    main()
