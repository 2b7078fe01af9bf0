"""Trains a small UNet to draw handwritten digits, on device xla, and draws a grid of them.

The network learns from scikit-learn's 1,797 digits of 8x8 pixels, with the digit as its condition, and draws with 25
steps of DDIM and guidance. There is no barrier in the sampling loop: images are read when it is done. A classifier that
knows the real digits says how many of the drawn ones it takes for what was asked. ``--peers`` times a training step
and drawing with PyTorch on the CPU too.

Example::

    python examples/digits_diffusion.py --output demo-output/drawn.png
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

import torch_xla
from torch_xla.distributed.parallel_loader import MpDeviceLoader

if __package__:
    from examples import common
else:
    import common

SIZE, COUNT = 8, 1797  # pixels of a side, images
NOISE_STEPS = 1000
NO_DIGIT = 10  # the condition "any digit"


class Block(nn.Module):
    """Two convolutions around a shortcut; the condition scales and shifts what is between them."""

    def __init__(self, inputs: int, outputs: int, condition: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, inputs), nn.GroupNorm(8, outputs)
        self.conv1, self.conv2 = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.condition = nn.Linear(condition, 2 * outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()
        nn.init.zeros_(self.conv2.weight)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """The block's features, (N, outputs, H, W)."""
        scale, shift = self.condition(condition)[:, :, None, None].chunk(2, dim=1)
        y = self.conv1(F.silu(self.norm1(x)))
        y = self.conv2(F.silu(self.norm2(y) * (1 + scale) + shift))
        return self.shortcut(x) + y


class UNet(nn.Module):
    """Noise in an image (N, 1, 8, 8) at a time (N,), given the digit (N,) that it shows."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        condition = 4 * width
        frequencies = torch.exp(-math.log(10000) * torch.arange(width // 2) / (width // 2))
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.time = nn.Sequential(nn.Linear(width, condition), nn.SiLU(), nn.Linear(condition, condition))
        self.digit = nn.Embedding(NO_DIGIT + 1, condition)
        self.inward = nn.Conv2d(1, width, 3, padding=1)
        self.high1, self.high2 = Block(width, width, condition), Block(3 * width, width, condition)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.low1, self.low2 = (Block(2 * width, 2 * width, condition) for _ in range(2))
        self.outward = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 1, 3, padding=1))
        nn.init.zeros_(self.outward[-1].weight)

    def forward(self, x: Tensor, t: Tensor, digit: Tensor) -> Tensor:
        """The predicted noise, shaped as the image."""
        angles = t[:, None] * self.frequencies
        condition = F.silu(self.time(torch.cat([angles.sin(), angles.cos()], dim=1)) + self.digit(digit))
        high = self.high1(self.inward(x), condition)
        low = self.low2(self.low1(self.down(high), condition), condition)
        up = F.interpolate(low, scale_factor=2.0, mode="nearest")
        return self.outward(self.high2(torch.cat([up, high], dim=1), condition))


def kept_signal(device: torch.device | str) -> Tensor:
    """How much of an image's variance is left after each step of noise, (1001,): a cosine from 1 to nearly 0."""
    t = torch.linspace(0, 1, NOISE_STEPS + 1)
    return (torch.cos((t + 0.008) / 1.008 * math.pi / 2) ** 2).clamp(1e-4, 0.9999).to(device)


def load_digits() -> tuple[Tensor, Tensor]:
    """All digits: images (1797, 1, 8, 8) in [-1, 1], and which they are."""
    from sklearn import datasets

    digits = datasets.load_digits()
    return torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1, torch.tensor(digits.target)


class Trainer:
    """The network, its moving average, which draws, and a step of training."""

    def __init__(self, device: torch.device | str, width: int, steps: int, compiled: bool = False) -> None:
        self.model = UNet(width).to(device)
        self.average = copy.deepcopy(self.model).requires_grad_(False).eval()
        self.network = torch.compile(self.model) if compiled else self.model
        self.kept = kept_signal(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=1e-3)
        self.schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=2e-3, total_steps=steps, cycle_momentum=False
        )

    def step(self, images: Tensor, digits: Tensor) -> Tensor:
        """Adds noise, predicts it, and learns from the difference; gives the loss."""
        self.optimizer.zero_grad()
        t = torch.randint(1, NOISE_STEPS + 1, (len(images),), device=images.device)
        kept = self.kept[t][:, None, None, None]
        noise = torch.randn_like(images)
        # One in ten learns without the digit, for the guidance.
        digits = torch.where(torch.rand(len(digits), device=digits.device) < 0.1, NO_DIGIT, digits)
        loss = F.mse_loss(self.network(kept.sqrt() * images + (1 - kept).sqrt() * noise, t, digits), noise)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        with torch.no_grad():
            for kept, new in zip(self.average.parameters(), self.model.parameters(), strict=True):
                kept.lerp_(new, 0.005)
        return loss.detach()


@torch.no_grad()
def draw(model: nn.Module, digits: Tensor, steps: int, guidance: float = 2.0) -> Tensor:
    """Images of digits by DDIM, (N, 1, 8, 8) in [-1, 1], on the digits' device.

    Args:
        model: The network.
        digits: What to draw, (N,).
        steps: How many steps.
        guidance: How much the digit counts; 1 for as it was learnt.
    """
    count = len(digits)
    kept = kept_signal(digits.device)
    both = torch.cat([digits, torch.full_like(digits, NO_DIGIT)])
    x = torch.randn(count, 1, SIZE, SIZE, device=digits.device)
    times = torch.linspace(NOISE_STEPS, 0, steps + 1).round().long().to(digits.device)
    levels = kept[times]
    for i in tqdm(range(steps), desc="drawing", disable=None):
        now, after = levels[i], levels[i + 1]
        with_digit, without = model(x.repeat(2, 1, 1, 1), times[i].expand(2 * count), both).chunk(2)
        noise = without + guidance * (with_digit - without)
        image = ((x - (1 - now).sqrt() * noise) / now.sqrt()).clamp(-1, 1)
        noise = (x - now.sqrt() * image) / (1 - now).sqrt()
        x = after.sqrt() * image + (1 - after).sqrt() * noise
    return image


def recognised(drawn: Tensor, digits: Tensor) -> float:
    """The share that a classifier of the real digits takes for what was asked."""
    from sklearn.svm import SVC

    images, labels = load_digits()
    classifier = SVC(gamma=0.02).fit(images.flatten(1).numpy(), labels.numpy())
    return float((classifier.predict(drawn.flatten(1).numpy()) == digits.numpy()).mean())


def draw_grid(drawn: Tensor, path: Path) -> None:
    """Writes images, ten rows of them, to a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    padded = F.pad(drawn[:, 0], (1, 1, 1, 1), value=-1.0)
    rows = padded.reshape(10, -1, SIZE + 2, SIZE + 2).permute(0, 2, 1, 3).reshape(10 * (SIZE + 2), -1)
    path.parent.mkdir(parents=True, exist_ok=True)
    plt.imsave(path, rows.repeat_interleave(4, 0).repeat_interleave(4, 1).numpy(), cmap="gray_r", vmin=-1, vmax=1)


def compare(options: argparse.Namespace) -> None:
    """Times a training step, and drawing, beside PyTorch's own on the CPU."""
    images, labels = load_digits()

    def training(device: str, compiled: bool) -> Callable[[], object]:
        trainer = Trainer(device, options.width, 10**6, compiled)
        batch = images[: options.batch_size].to(device), labels[: options.batch_size].to(device)
        return lambda: trainer.step(*batch)

    def drawing(device: str, compiled: bool) -> Callable[[], object]:
        model = UNet(options.width).to(device).eval()
        network = torch.compile(model) if compiled else model
        digits = torch.arange(10).repeat_interleave(options.columns).to(device)
        return lambda: draw(network, digits, options.sampling_steps)

    builds = {f"training with {options.batch_size} images": training, f"drawing {10 * options.columns} images": drawing}
    common.compare_with_peers(options.peers, builds)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=common.positive, default=60)
    parser.add_argument("--batch-size", type=common.positive, default=64)
    parser.add_argument("--width", type=common.positive, default=32, help="channels of the network, a multiple of 8")
    parser.add_argument("--sampling-steps", type=common.positive, default=25)
    parser.add_argument("--columns", type=common.positive, default=12, help="drawings of each digit")
    parser.add_argument("--output", type=Path, default=Path("demo-output/digits_diffusion.png"))
    common.add_peers(parser)
    options = parser.parse_args(arguments)
    if options.width % 8 or options.width < 8:
        common.refuse(f"got --width {options.width}, expected a multiple of 8")
    if options.batch_size > COUNT:
        common.refuse(f"got --batch-size {options.batch_size}, expected at most {COUNT}, the number of digits")
    return options


def main() -> int:
    """Trains, draws, reports; returns the exit status."""
    options = parse()
    torch.manual_seed(0)
    if options.peers:
        compare(options)
        return 0
    device = torch_xla.device()
    images, labels = load_digits()
    loader = MpDeviceLoader(
        DataLoader(TensorDataset(images, labels), options.batch_size, shuffle=True, drop_last=True), device
    )
    trainer = Trainer(device, options.width, options.epochs * len(loader))
    began = time.perf_counter()
    with tqdm(total=options.epochs * len(loader), unit="step", disable=None) as progress:
        for _ in range(options.epochs):
            losses = []
            for batch in loader:  # each ends with a barrier
                losses.append(trainer.step(*batch))
                progress.update()
            loss = torch.stack(losses).mean().item()
            progress.set_postfix(loss=f"{loss:.4f}")
    trained, graphs = time.perf_counter() - began, common.compiles()

    digits = torch.arange(10).repeat_interleave(options.columns)
    times = []
    for _ in range(2):  # the second time nothing is compiled
        began = time.perf_counter()
        drawn = draw(trainer.average, digits.to(device), options.sampling_steps).cpu()
        times.append(time.perf_counter() - began)
    draw_grid(drawn, options.output)
    print(
        f"trained {common.parameters_of(trainer.model):,} parameters for {options.epochs} epochs in {trained:.1f} s: "
        f"loss {loss:.4f}, {common.graphs(graphs)} compiled"
    )
    print(
        f"drew {len(digits)} digits in {times[0]:.1f} s, {common.graphs(common.compiles() - graphs)} compiled; ", end=""
    )
    print(f"again in {times[1]:.2f} s")
    print(f"recognised as what was asked: {recognised(drawn, digits):.3f}")
    print(f"grid: {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
