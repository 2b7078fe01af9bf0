"""Generated pictures of ten kinds of patterns, each at a place, of a size and in colours of its own, light on dark."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

Grid = np.ndarray
# Each is a mask over coordinates from -1 to 1 around the pattern's middle.
KINDS: dict[str, Callable[[Grid, Grid], Grid]] = {
    "disc": lambda x, y: x**2 + y**2 < 1,
    "ring": lambda x, y: np.abs(np.hypot(x, y) - 0.8) < 0.2,
    "square": lambda x, y: np.maximum(abs(x), abs(y)) < 0.9,
    "frame": lambda x, y: np.abs(np.maximum(abs(x), abs(y)) - 0.75) < 0.2,
    "triangle": lambda x, y: (abs(x) < (y + 1) / 2) & (y < 1),
    "cross": lambda x, y: (np.minimum(abs(x), abs(y)) < 0.25) & (np.maximum(abs(x), abs(y)) < 1),
    "diagonal cross": lambda x, y: (np.minimum(abs(x + y), abs(x - y)) < 0.35) & (np.maximum(abs(x), abs(y)) < 1),
    "bars": lambda x, y: (np.floor(4 * x) % 2 == 0) & (np.maximum(abs(x), abs(y)) < 1),
    "lines": lambda x, y: (np.floor(4 * y) % 2 == 0) & (np.maximum(abs(x), abs(y)) < 1),
    "checks": lambda x, y: ((np.floor(3 * x) + np.floor(3 * y)) % 2 == 0) & (np.maximum(abs(x), abs(y)) < 1),
}


class Shapes(Dataset[tuple[Tensor, int]]):
    """Pictures (3, size, size) float32 around 0, and which kind each is; the same index gives the same picture.

    Args:
        count: How many.
        size: Pixels of a side.
        seed: Another one gives other pictures.
    """

    def __init__(self, count: int, size: int, seed: int) -> None:
        self.count, self.size, self.seed = count, size, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        random = np.random.default_rng((self.seed, index))
        kind = index % len(KINDS)
        reach = random.uniform(0.4, 0.6)
        middle = random.uniform(-0.3, 0.3, 2)
        grid = np.linspace(-1, 1, self.size)
        mask = list(KINDS.values())[kind]((grid[None, :] - middle[0]) / reach, (grid[:, None] - middle[1]) / reach)
        front, back = random.uniform(0.2, 1, (3, 1, 1)), -random.uniform(0.2, 1, (3, 1, 1))
        picture = np.where(mask[None], front, back) + random.normal(0, 0.1, (3, self.size, self.size))
        return torch.from_numpy(picture.astype(np.float32)), kind
