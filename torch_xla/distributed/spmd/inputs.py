"""Splits of what goes from the host to the device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from torch_xla import _api, _bindings
from torch_xla._core.device import placement, shardings, transfer
from torch_xla._errors import message
from torch_xla.distributed.spmd.marking import mark_sharding
from torch_xla.distributed.spmd.mesh import Mesh, PartitionSpec


@dataclass
class ShardingSpec:
    """The sharding of tensors on their way to the device.

    Attributes:
        mesh: The devices.
        partition_spec: See `mark_sharding`.
        minibatch: Whether each process gives those rows of the batch only that its devices have.

    Raises:
        ValueError: The mesh has no such axes.
    """

    mesh: Mesh
    partition_spec: PartitionSpec
    minibatch: bool | None = False

    def __post_init__(self) -> None:
        self.mesh.axes_of(self.partition_spec)

    def can_apply(self, t: torch.Tensor) -> bool:
        """Whether the tensor has as many dimensions as the spec has entries."""
        return len(t.shape) == len(self.partition_spec)

    def apply(self, t: torch.Tensor) -> None:
        """Marks a tensor on the current device."""
        if t.device != _api.device():
            raise AssertionError(message("spmd", f"got a tensor on {t.device}", expected=str(_api.device())))
        mark_sharding(t, self.mesh, self.partition_spec)

    def send(self, t: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A tensor on the device with the values of a CPU tensor: each device gets its part, and nothing is compiled.

        It may be this process's rows alone: RuntimeError where these do not divide.
        """
        if not self.minibatch:
            index, number = device.index or 0, shardings.number_of(self.mesh.split(self.partition_spec))
            buffer = transfer.upload(t.detach(), index, number)  # now, and not when a program takes it
            return _bindings.tensor_of(buffer, list(t.shape), t.dtype, index, number)
        return _send_rows(t, self.mesh.split(self.partition_spec), device)


def _send_rows(t: torch.Tensor, tiling: shardings.TileAssignment, device: torch.device) -> torch.Tensor:
    """Sends a batch of which each process has those rows that its devices have, in their order."""
    place = placement.of(device.index or 0)
    local = {place.devices.index(member) for member in place.local}
    below = math.prod(tiling.tiles[1:]) * tiling.copies  # devices of one tile of rows
    local_tiles = sorted({at // below for at, member in enumerate(tiling.order) if member in local})
    rest = all(size % tiles == 0 for size, tiles in zip(t.shape[1:], tiling.tiles[1:], strict=True))
    if t.shape[0] % len(local_tiles) or not rest:
        raise RuntimeError(
            message(
                "spmd",
                "When minibatch is configured, the per-host batch size must be divisible by local runtime device "
                f"count. Per host input data shape {tuple(t.shape)} is split into {len(local_tiles)} of {tiling.tiles}",
            )
        )
    rows = t.shape[0] // len(local_tiles)
    shape = (rows * tiling.tiles[0], *t.shape[1:])
    values = transfer.own_values(t)
    parts = []
    for member, where, _ in tiling.indices(shape):
        if member in local:
            start = local_tiles.index(where[0].start // rows) * rows
            parts.append(values[(slice(start, start + rows), *where[1:])])
    number = shardings.number_of(tiling)
    buffer = transfer.put_parts(parts, shape, device.index or 0, number)
    return _bindings.tensor_of(buffer, list(shape), t.dtype, device.index or 0, number)
