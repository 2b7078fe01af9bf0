"""Draws the pictures of how-it-works.md: ``python docs/images/draw.py``."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
NODE, PROGRAM, PYTHON, DEVICE = "#d0e2ff", "#1f6feb", "#d4a72c", "#8250df"
OPERATORS = ("forward", "backward", "optimizer")


def box(
    axes: plt.Axes, x: float, y: float, width: float, height: float, text: str, color: str, **style: object
) -> None:
    """A box with text in it."""
    axes.add_patch(plt.Rectangle((x, y), width, height, facecolor=color, edgecolor="black", linewidth=0.6, **style))
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=7)


def graphs() -> None:
    """What is compiled with a barrier after each step, and without."""
    figure, rows = plt.subplots(2, 1, figsize=(7.5, 3.2), layout="constrained")
    for axes, title in zip(
        rows, ("a barrier after each step: one graph, compiled once, run three times",
               "no barrier: the graph has all steps, and another number of steps is another graph"), strict=True,
    ):  # fmt: skip
        axes.set_title(title, fontsize=8, loc="left")
        axes.set(xlim=(-0.2, 11.2), ylim=(-0.6, 1.3))
        axes.axis("off")
        for step in range(3):
            for number, name in enumerate(OPERATORS):
                x = 3.7 * step + 1.15 * number
                box(axes, x, 0.2, 0.95, 0.6, name, NODE)
                last = step == 2 and number == 2
                if not last:
                    across = 0.2 if number < 2 else 0.45
                    axes.annotate(
                        "", (x + 0.95 + across, 0.5), (x + 0.95, 0.5), arrowprops={"arrowstyle": "->", "lw": 0.7}
                    )
    for step in range(3):
        rows[0].add_patch(plt.Rectangle((3.7 * step - 0.12, 0), 3.5, 1, fill=False, edgecolor=PROGRAM, linewidth=1.6))
        words = "compiled" if step == 0 else "found again"
        rows[0].text(3.7 * step + 1.6, -0.35, words, ha="center", fontsize=7, color=PROGRAM)
    rows[1].add_patch(plt.Rectangle((-0.12, 0), 10.9, 1, fill=False, edgecolor=PROGRAM, linewidth=1.6))
    rows[1].text(5.3, -0.35, "compiled", ha="center", fontsize=7, color=PROGRAM)
    figure.savefig(HERE / "graphs.png", dpi=100)


def pipeline() -> None:
    """Python and the device at work, with and without a value read in each step."""
    figure, rows = plt.subplots(2, 1, figsize=(7.5, 3.0), layout="constrained", sharex=True)
    for axes, title, read in zip(rows, ("no value is read", "loss.item() in each step"), (False, True), strict=True):
        axes.set_title(title, fontsize=8, loc="left")
        free = start = 0.0
        for step in range(1, 5):
            box(axes, start, 1.2, 1.4, 0.7, f"record {step}", PYTHON)
            free = max(free, start + 1.4)
            box(axes, free, 0.2, 2.0, 0.7, f"run {step}", DEVICE, alpha=0.55)
            free += 2.0
            if read:
                box(axes, start + 1.4, 1.2, free - start - 1.4, 0.7, "wait", "#eeeeee")
            start = free if read else start + 1.4
        axes.set(xlim=(-0.1, 14), ylim=(0, 2.1), yticks=[0.55, 1.55], xticks=[])
        axes.set_yticklabels(["device", "Python"], fontsize=7)
        axes.spines[["top", "right", "left"]].set_visible(False)
    rows[1].set_xlabel("time", fontsize=7)
    figure.savefig(HERE / "pipeline.png", dpi=100)


if __name__ == "__main__":
    graphs()
    pipeline()
