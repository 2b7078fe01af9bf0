"""Trains a ResNet-50 on pictures, on all devices of this host, as torch_xla's own ImageNet program does.

The pictures are generated, ten kinds of patterns; ``--data FOLDER`` takes those of a folder with ``train`` and ``val``
in it, a folder for each kind, by torchvision where that is installed. Loader, step closures, rate tracker and
`optimizer_step` are used as in torch_xla 2. ``--peers`` times a step beside PyTorch on the CPU.

Examples::

    python examples/train_resnet.py --depth 18 --size 64 --epochs 3
    CPU_NUM_DEVICES=2 PJRT_DEVICE=CPU python examples/train_resnet.py --epochs 1
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla.distributed.parallel_loader import MpDeviceLoader

if __package__:
    from examples import common, shapes_data
else:
    import common
    import shapes_data

DEPTHS = {18: ("basic", [2, 2, 2, 2]), 34: ("basic", [3, 4, 6, 3]), 50: ("bottleneck", [3, 4, 6, 3])}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with train/ and val/; generated pictures by default")
    parser.add_argument("--depth", type=int, choices=DEPTHS, default=50)
    parser.add_argument("--size", type=common.positive, default=64, help="pixels of a side")
    parser.add_argument("--epochs", type=common.positive, default=3)
    parser.add_argument(
        "--images", type=common.positive, default=2000, help="generated pictures of an epoch; a fifth to test with"
    )
    parser.add_argument("--batch-size", type=common.positive, default=32, help="of each device")
    parser.add_argument("--learning-rate", type=float, default=0.02)
    parser.add_argument("--workers", type=int, default=1, help="processes that make or read pictures")
    parser.add_argument("--log-every", type=common.positive, default=20)
    common.add_peers(parser)
    options = parser.parse_args(arguments)
    if options.size < 32:
        common.refuse(f"got --size {options.size}, expected at least 32: the network halves it five times")
    if options.data is not None and not (options.data / "train").is_dir():
        common.refuse(
            f"there is no folder {options.data / 'train'}; give one with train/ and val/, or leave --data out"
        )
    return options


def data_of(options: argparse.Namespace) -> tuple[Dataset[Any], Dataset[Any], int]:
    """What to train on, what to test with, and how many kinds there are."""
    if options.data is None:
        train = shapes_data.Shapes(options.images, options.size, seed=1)
        return train, shapes_data.Shapes(options.images // 5, options.size, seed=2), len(shapes_data.KINDS)
    try:
        from torchvision import datasets, transforms
    except ImportError:
        common.refuse("--data needs torchvision to read pictures: pip install torchvision")
    normal = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    cut = [transforms.RandomResizedCrop(options.size), transforms.RandomHorizontalFlip()]
    whole = [transforms.Resize(options.size * 8 // 7), transforms.CenterCrop(options.size)]
    train = datasets.ImageFolder(options.data / "train", transforms.Compose([*cut, transforms.ToTensor(), normal]))
    test = datasets.ImageFolder(options.data / "val", transforms.Compose([*whole, transforms.ToTensor(), normal]))
    return train, test, len(train.classes)


class Net(nn.Module):
    """A residual network of transformers: (N, 3, H, W) float32 to (N, kinds) scores."""

    def __init__(self, depth: int, kinds: int) -> None:
        super().__init__()
        from transformers import ResNetConfig, ResNetForImageClassification

        layer, depths = DEPTHS[depth]
        widths = [64, 128, 256, 512] if layer == "basic" else [256, 512, 1024, 2048]
        config = ResNetConfig(layer_type=layer, depths=depths, hidden_sizes=widths, num_labels=kinds)
        self.network = ResNetForImageClassification(config)

    def forward(self, images: Tensor) -> Tensor:
        """The scores."""
        return self.network(pixel_values=images).logits


def make_step(
    model: Callable[..., Any], optimizer: torch.optim.Optimizer, apply: Callable[[], object]
) -> Callable[..., Tensor]:
    """A training step; gives the loss."""

    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
        loss.backward()
        apply()
        return loss.detach()

    return step


def optimizer_of(model: nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    """The optimizer."""
    return torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9, weight_decay=1e-4, nesterov=True)


def loader_of(data: Dataset[Any], options: argparse.Namespace, shuffle: bool) -> MpDeviceLoader:
    """This process's share of the data, on its device."""
    sampler = DistributedSampler(data, xr.world_size(), xr.global_ordinal(), shuffle=shuffle, drop_last=True)
    loader = DataLoader(
        data, options.batch_size, sampler=sampler, drop_last=True, num_workers=options.workers,
        multiprocessing_context="spawn" if options.workers else None, persistent_workers=options.workers > 0,
    )  # fmt: skip
    return MpDeviceLoader(loader, torch_xla.device())


@torch.no_grad()
def accuracy_of(model: nn.Module, batches: Iterable[Any]) -> float:
    """The share of a test set that is named right, over all processes."""
    model.eval()
    hits, count = [], 0
    for images, labels in batches:
        hits.append((model(images).argmax(1) == labels).sum())
        count += len(labels)
    model.train()
    found = torch.stack(hits).sum().item()
    return xm.mesh_reduce("hits", found, sum) / xm.mesh_reduce("count", count, sum)


def train(index: int, options: argparse.Namespace) -> float:
    """What each process runs; gives the test accuracy."""
    torch.manual_seed(0)  # the same parameters in each process
    train_data, test_data, kinds = data_of(options)
    batches, test_batches = loader_of(train_data, options, True), loader_of(test_data, options, False)
    if not len(batches) or not len(test_batches):
        common.refuse(f"there is less than a batch of {options.batch_size} for each device; give more --images")
    model = Net(options.depth, kinds).to(torch_xla.device())
    optimizer = optimizer_of(model, options)
    total = options.epochs * len(batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.learning_rate, total_steps=total + 1)
    step = make_step(model, optimizer, lambda: xm.optimizer_step(optimizer))
    tracker = xm.RateTracker()
    rates: list[float] = []
    accuracy = 0.0

    def report(number: int, loss: Tensor) -> None:
        rates.append(tracker.rate() * xr.world_size())
        xm.master_print(f"step {number} of {total}: loss {loss.item():.3f}, {rates[-1]:.0f} images/s")

    began, number = time.perf_counter(), 0
    for epoch in range(options.epochs):
        for images, labels in batches:
            loss = step(images, labels)
            schedule.step()
            tracker.add(len(labels))
            number += 1
            if number % options.log_every == 0:
                xm.add_step_closure(report, args=(number, loss), run_async=False)
        accuracy = accuracy_of(model, test_batches)
        xm.master_print(f"epoch {epoch + 1}: test accuracy {accuracy:.3f}")
    xm.master_print(
        f"ResNet-{options.depth}, {common.parameters_of(model):,} parameters, {number} steps and "
        f"{options.epochs} tests in {time.perf_counter() - began:.0f} s, {common.graphs(common.compiles())} compiled, "
        f"accuracy {accuracy:.3f}"
    )
    return accuracy


def compare(options: argparse.Namespace) -> None:
    """Times a step beside PyTorch's own on the CPU."""
    images, labels = next(iter(DataLoader(shapes_data.Shapes(options.images, options.size, 1), options.batch_size)))

    def build(device: str, compiled: bool) -> Callable[[], object]:
        model = Net(options.depth, len(shapes_data.KINDS)).to(device)
        optimizer = optimizer_of(model, options)
        step = make_step(torch.compile(model) if compiled else model, optimizer, optimizer.step)
        batch = images.to(device), labels.to(device)
        return lambda: step(*batch)

    common.compare_with_peers(options.peers, {"a step": build})


def main() -> int:
    """Starts a process per device."""
    options = parse()
    if options.peers:
        compare(options)
    else:
        torch_xla.launch(train, (options,))
    return 0


if __name__ == "__main__":
    sys.exit(main())
