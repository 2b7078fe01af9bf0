"""Draws the step times of `benchmarks/results/` as one chart: ``python -m benchmarks.chart``."""

from __future__ import annotations

import json

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.run import RESULTS, ROOT

WORKLOADS = {
    "mlp": "20 × (Linear, LayerNorm)",
    "resnet": "ResNet-18",
    "gpt2": "GPT-2, 6 layers",
    "llama": "Llama, 4 layers",
    "unet": "U-Net, drawing",
}
COLUMNS = 3
RUNNERS = {"": "torch_xla", "eager_": "PyTorch eager", "inductor_": "torch.compile", "jax_": "JAX, jitted by hand"}
COLORS = ("#1f6feb", "#8c959f", "#d4a72c", "#8250df")


def main() -> None:
    """Writes ``docs/steps.png`` from the figures kept for CPUs."""
    kept = json.loads((RESULTS / "cpu-2-cores.json").read_text())
    figures = kept["figures"]
    measured = [name for name in WORKLOADS if all(f"{name}_{runner}step_ms" in figures for runner in RUNNERS)]
    rows = -(-len(measured) // COLUMNS)
    figure, axes = plt.subplots(rows, COLUMNS, figsize=(9, 0.4 + 2.2 * rows), layout="constrained", squeeze=False)
    for i, axis in enumerate(axes.flat):
        if i >= len(measured):
            axis.set_axis_off()
            continue
        times = [figures[f"{measured[i]}_{runner}step_ms"] for runner in RUNNERS]
        bars = axis.barh(list(RUNNERS.values()), times, color=COLORS)
        axis.bar_label(bars, fmt="%.3g ms", padding=3, fontsize=8)
        axis.set(title=WORKLOADS[measured[i]], xlim=(0, max(times) * 1.35), xticks=[])
        axis.invert_yaxis()
        axis.spines[["top", "right", "bottom"]].set_visible(False)
        if i % COLUMNS:
            axis.set_yticks([])
    machine = kept["machine"]
    figure.suptitle(
        f"One step on {machine['cpu']} cores, torch {machine['torch'].split('+')[0]}, jax {machine['jax']}"
        " (less is better)",
        fontsize=9,
    )
    figure.savefig(ROOT / "docs" / "steps.png", dpi=110)


if __name__ == "__main__":
    main()
