"""Tensors with a sharding annotation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from torch_xla.distributed.spmd.mesh import PartitionSpec


class ShardingType(IntEnum):
    """Kinds of sharding, numbered as in XLA's `OpSharding`."""

    REPLICATED = 0
    MAXIMAL = 1
    TUPLE = 2
    TILED = 3
    MANUAL = 4
    PARTIAL = 5
    UNKNOWN = 6


@dataclass
class XLAShard:
    """One device's part of a tensor.

    Attributes:
        data: The part.
        indices: The slices of the whole that it holds, or an ellipsis for all of it.
        shard_device: The device.
        replica_id: Which of several equal copies this is.
    """

    data: torch.Tensor
    indices: Any
    shard_device: str
    replica_id: int

    @property
    def unpadded_data(self) -> torch.Tensor:
        """The part without the padding of uneven splits."""
        return self.data if self.indices is ... else self.data[tuple(slice(0, s.stop - s.start) for s in self.indices)]


class XLAShardedTensor(torch.Tensor):
    """A view of a tensor that knows its mesh and partition spec. Operations on it give plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    mesh_shape: tuple[int, ...] | None
    partition_spec: PartitionSpec | None

    @staticmethod
    def __new__(
        cls,
        elem: torch.Tensor,
        mesh_shape: tuple[int, ...] | None = None,
        partition_spec: PartitionSpec | None = None,
    ) -> XLAShardedTensor:
        """Views ``elem``."""
        made = elem.as_subclass(cls)
        made.mesh_shape, made.partition_spec = mesh_shape, partition_spec
        return made

    @property
    def global_tensor(self) -> torch.Tensor:
        """The whole as a plain tensor; both share their values."""
        return self.as_subclass(torch.Tensor)

    @property
    def local_shards(self) -> list[XLAShard]:
        """The parts on devices of this process."""
        return [XLAShard(self.global_tensor, ..., str(self.device), 0)]

    @property
    def sharding_type(self) -> ShardingType:
        """How it is split: on one device, replicated."""
        return ShardingType.REPLICATED

    @property
    def sharding_spec(self) -> str:
        """The annotation in XLA's notation."""
        return "{replicated}"
