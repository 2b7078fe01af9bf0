"""Has the operators that begin and end manual sharding, and the collectives of devices between them."""

from __future__ import annotations

import torch

from torch_xla._core.device import shardings
from torch_xla._core.graph.library import XLA_LIB

_DEFINITIONS = (
    "full_to_shard(Tensor self, int placement) -> Tensor",
    "shard_to_full(Tensor self, int placement, int[] size) -> Tensor",
    "spmd_all_reduce(Tensor self, str reduction, float scale, int[] groups, int count) -> Tensor",
    "spmd_reduce_scatter(Tensor self, str reduction, float scale, int dim, int[] groups, int count) -> Tensor",
)


def install() -> None:
    """Registers the operators with PyTorch; called once, at import."""
    for definition in _DEFINITIONS:
        XLA_LIB.define(definition)
    XLA_LIB.impl("full_to_shard", _part, "Meta")
    XLA_LIB.impl("shard_to_full", lambda self, placement, size: self.new_empty(size), "Meta")
    XLA_LIB.impl("spmd_all_reduce", lambda self, *rest: torch.empty_like(self), "Meta")
    XLA_LIB.impl("spmd_reduce_scatter", _scattered, "Meta")


def _part(tensor: torch.Tensor, number: int) -> torch.Tensor:
    split = shardings.by_number(number)
    if split is None:
        return torch.empty_like(tensor)
    return tensor.new_empty([size // tiles for size, tiles in zip(tensor.shape, split.tiles, strict=True)])


def _scattered(
    self: torch.Tensor, reduction: str, scale: float, dim: int, groups: list[int], count: int
) -> torch.Tensor:
    shape = list(self.shape)
    shape[dim] //= count
    return self.new_empty(shape)
