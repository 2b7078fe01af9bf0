"""Trains a small convolutional network on scikit-learn's handwritten digits, on device xla.

1,797 images of 8x8 pixels; a fifth is held out for the test. Prints the test accuracy, the short metrics report and
where the time went, and draws the loss and accuracy curves. Exits with an error below an accuracy of 0.97.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm

TARGET_ACCURACY = 0.97


class DigitsNet(nn.Module):
    """Two convolutions, a pooling and two dense layers: (N, 1, 8, 8) float32 to (N, 10) scores."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(64 * 4 * 4, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images: Tensor) -> Tensor:
        """Scores of the ten digits."""
        return self.classifier(self.features(images))


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """The digits as (images in [0, 1], labels): 1,437 to train on and 360 to test with."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    train, test = train_test_split(range(len(labels)), test_size=360, stratify=digits.target, random_state=0)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def draw_curves(losses: list[float], accuracies: list[float], path: Path) -> None:
    """Writes the training loss and the test accuracy by epoch to a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    epochs = range(1, len(losses) + 1)
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    left.plot(epochs, losses, marker="o")
    left.set(title="Training loss", xlabel="epoch", ylabel="cross entropy", yscale="log")
    right.plot(epochs, accuracies, marker="o", color="tab:green")
    right.axhline(TARGET_ACCURACY, linestyle="--", color="grey", label=f"target {TARGET_ACCURACY}")
    right.set(title="Test accuracy", xlabel="epoch", ylabel="accuracy")
    right.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    """Trains, tests, reports; returns the exit status."""
    import torch_xla
    import torch_xla.debug.metrics as met
    from torch_xla.distributed.parallel_loader import MpDeviceLoader

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--output", type=Path, default=Path("demo-output/digits.png"), help="where the curves go")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    device = torch_xla.device()
    train_data, test_data = load_data()
    train_loader = MpDeviceLoader(
        DataLoader(train_data, batch_size=arguments.batch_size, shuffle=True, drop_last=True), device
    )
    test_loader = MpDeviceLoader(DataLoader(test_data, batch_size=120), device)

    model = DigitsNet().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    loss_of = nn.CrossEntropyLoss()
    losses: list[float] = []
    accuracies: list[float] = []
    tracing = 0.0
    start = time.perf_counter()

    with tqdm(total=arguments.epochs * len(train_loader), unit="step", disable=None) as progress:
        for _ in range(arguments.epochs):
            model.train()
            step_losses = []
            # The loader hands out batches that are already on the device, and ends each step with a barrier.
            for images, labels in train_loader:
                began = time.perf_counter()
                optimizer.zero_grad()
                loss = loss_of(model(images), labels)
                loss.backward()
                optimizer.step()
                step_losses.append(loss.detach())
                tracing += time.perf_counter() - began
                progress.update()
            losses.append(torch.stack(step_losses).mean().item())

            model.eval()
            with torch.no_grad():
                hits = [(model(images).argmax(1) == labels).sum() for images, labels in test_loader]
            accuracies.append(torch.stack(hits).sum().item() / len(test_data))
            progress.set_postfix(loss=f"{losses[-1]:.4f}", accuracy=f"{accuracies[-1]:.4f}")
    wall = time.perf_counter() - start

    draw_curves(losses, accuracies, arguments.output)
    print(met.short_metrics_report())

    def seconds(metric: str) -> float:
        data = met.metric_data(metric)
        return data[1] / 1e9 if data else 0.0

    print(
        f"{met.counter_value('UncachedCompile') or 0} graphs compiled in a loop of {wall:.1f} s on {device}: "
        f"tracing {tracing:.2f} s, lowering {seconds('LoweringTime'):.2f} s, "
        f"compiling {seconds('CompileTime'):.2f} s, executing {seconds('ExecuteTime'):.2f} s"
    )
    print(f"curves: {arguments.output}")
    print(f"training loss {losses[-1]:.4f}, test accuracy {accuracies[-1]:.4f} (target {TARGET_ACCURACY})")
    return 0 if accuracies[-1] >= TARGET_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
