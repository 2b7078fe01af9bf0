"""Splits as XLA's `OpSharding` tells them, which vendors read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from torch_xla._core.device import shardings
from torch_xla._errors import message


class ShardingType(IntEnum):
    """Kinds of sharding, numbered as in XLA's `OpSharding`."""

    REPLICATED = 0
    MAXIMAL = 1
    TUPLE = 2
    TILED = 3
    MANUAL = 4
    PARTIAL = 5
    UNKNOWN = 6


class OpSharding:
    """A tensor's sharding, in XLA's terms.

    Args:
        tile_assignment: The devices in the shape of the tiles; for partial replication any shape.
        group_assignment: For partial replication, which group has which tile.
        replication_groups: For partial replication, the devices of each group.
        sharding_type: The kind, as a `ShardingType`.
    """

    def __init__(
        self,
        tile_assignment: Any,
        group_assignment: Any,
        replication_groups: Sequence[Sequence[int]],
        sharding_type: int,
    ) -> None:
        self.type = ShardingType(sharding_type)
        self.split: shardings.TileAssignment | None = None
        if self.type == ShardingType.TILED:
            tiles = np.array(tile_assignment)
            self.split = shardings.tile_assignment(tiles.shape, tiles.reshape(-1).tolist())
        elif self.type == ShardingType.PARTIAL:
            groups = np.array(group_assignment)
            members = np.array(replication_groups)[groups.reshape(-1)]
            self.split = shardings.tile_assignment(groups.shape, members.reshape(-1).tolist())
        elif self.type not in (ShardingType.REPLICATED, ShardingType.MAXIMAL, ShardingType.MANUAL):
            raise ValueError(message("spmd", f"got sharding type {self.type.name}", expected="one of a single tensor"))
        if self.split is not None and self.split.is_replicated:
            self.type, self.split = ShardingType.REPLICATED, None

    @classmethod
    def of(cls, number: int) -> OpSharding:
        """The form of a placement."""
        sharding = cls([], [], [], ShardingType.REPLICATED)
        sharding.split = shardings.by_number(number)
        if sharding.split is not None:
            sharding.type = ShardingType.PARTIAL if sharding.split.copies > 1 else ShardingType.TILED
        return sharding

    @property
    def number(self) -> int:
        """Its placement number."""
        return shardings.EXPLICITLY_REPLICATED if self.split is None else shardings.number_of(self.split)

    def shape_of(self, part: Sequence[int]) -> tuple[int, ...]:
        """Shape of the whole of equal parts."""
        if self.split is None:
            return tuple(part)
        return tuple(math.prod(pair) for pair in zip(part, self.split.tiles, strict=True))

    def __str__(self) -> str:
        if self.type == ShardingType.MANUAL:
            return "{manual}"
        return "{replicated}" if self.split is None else str(self.split)

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OpSharding) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))
