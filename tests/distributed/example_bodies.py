"""What the processes of a job run in test_examples.py."""

from __future__ import annotations

from pathlib import Path

from examples import train_digits_multi as example

SMALL = ["--epochs", "2", "--steps", "6", "--learning-rate", "0.3"]


def train_each_way(index: int, ways: list[str], folder: str) -> None:
    """Writes what each way gives."""
    for how in ways:
        loss = example.train(index, example.parse([*SMALL, "--how", how]))
        if index == 0:
            (Path(folder) / how).write_text(str(loss))
