"""Private functions of the original on splits, which vendors and libraries call; `torch_xla._XLAC` has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_xla import _bindings
from torch_xla._core.device import client, placement, shardings
from torch_xla._core.execute import parts
from torch_xla._errors import message
from torch_xla.distributed.spmd import marking
from torch_xla.distributed.spmd.op_sharding import OpSharding, ShardingType
from torch_xla.distributed.spmd.xla_sharded_tensor import XLAShardedTensor, load_parts

Tensors = Sequence[torch.Tensor]


def get_spec(tensor: torch.Tensor) -> str:
    """A tensor's sharding in XLA's notation; empty if nobody set one and it is not computed."""
    return XLAShardedTensor(tensor).sharding_spec


def get_specs(tensors: Tensors) -> list[str]:
    """`get_spec` of several tensors."""
    return [get_spec(tensor) for tensor in tensors]


def get_op_sharding(tensor: torch.Tensor) -> OpSharding | None:
    """A tensor's sharding, or None."""
    number = parts.number_of(marking.unwrapped(tensor).detach())
    return OpSharding.of(number) if shardings.text_of(number) else None


def get_type(tensor: torch.Tensor) -> int | None:
    """Kind of a tensor's sharding, or None."""
    sharding = get_op_sharding(tensor)
    return None if sharding is None else int(sharding.type)


def mark(tensor: torch.Tensor, sharding: OpSharding) -> None:
    """Shards a tensor from now on; RuntimeError if it has another sharding."""
    marking.mark(tensor, sharding.number)


def annotate(tensor: torch.Tensor, sharding: OpSharding) -> None:
    """Changes a tensor's sharding, in the next program."""
    parts.place(marking.unwrapped(tensor).detach(), sharding.number, recorded=True)


def local_shards(tensors: Tensors) -> list[list[tuple[torch.Tensor, str]]]:
    """Per tensor the part of each device of this process, on the host, with the device's name."""
    return [[(s.data, s.shard_device) for s in XLAShardedTensor(t).local_shards] for t in tensors]


def local_shard_places(tensors: Tensors) -> list[list[tuple[int, Any]]]:
    """Per tensor for each of these parts which copy it is, and what of the tensor."""
    return [[(s.replica_id, s.indices) for s in XLAShardedTensor(t).local_shards] for t in tensors]


def load_local_shards(tensor: torch.Tensor, shards: Tensors, devices: Sequence[str]) -> None:
    """Replaces the values of the parts of this process's devices."""
    load_parts(marking.unwrapped(tensor).detach(), shards, devices)


def tensor_of_shards(shards: Tensors, sharding: OpSharding, global_shape: torch.Size | None = None) -> torch.Tensor:
    """A tensor of parts that are on the host, one for each device of this process, in their order.

    Its shape is less than the parts together where the last ones are padded. Raises RuntimeError where they do not fit.
    """
    count = len(placement.of(0).local)
    if len(shards) != count or len({s.shape for s in shards}) > 1:
        raise RuntimeError(message("spmd", f"got {len(shards)} shards", expected=f"{count} of equal shape"))
    shard_shape = tuple(shards[0].shape)
    shape = sharding.shape_of(shard_shape) if global_shape is None else tuple(global_shape)
    tiles = (1,) * len(shard_shape) if sharding.split is None else sharding.split.tiles
    if len(shape) != len(shard_shape) or any(
        -(-n // t) != size for n, t, size in zip(shape, tiles, shard_shape, strict=True)
    ):
        raise RuntimeError(
            message(
                "spmd",
                f"got shards of shape {shard_shape} for a tensor of shape {shape} in tiles {tiles}",
                do="pass one shard per tile",
            )
        )
    buffer = parts.buffer_of(list(shards), sharding.split, shape, 0)
    return _bindings.tensor_of(buffer, list(shape), shards[0].dtype, 0, sharding.number)


class XlaShardingSpec:
    """The sharding of a tensor on its way to the device, see `OpSharding`.

    With `minibatch` each process gives its part of the batch only.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        tile_assignment: Any,
        group_assignment: Any,
        replication_groups: Any,
        sharding_type: int,
        minibatch: bool = False,
    ) -> None:
        self.sharding = OpSharding(tile_assignment, group_assignment, replication_groups, sharding_type)
        self.minibatch = minibatch


def tensors_from_aten(
    tensors: Tensors, devices: Sequence[str], shardings: Sequence[XlaShardingSpec | None] | None = None
) -> list[torch.Tensor]:
    """Copies of CPU tensors, one per device named, split where that is asked for."""
    sent = [tensor.detach().to(device) for tensor, device in zip(tensors, devices, strict=True)]
    for tensor, spec in zip(sent, shardings or [None] * len(sent), strict=True):
        if spec is not None:
            parts.place(tensor, spec.sharding.number)
    return sent


def device_names() -> list[str]:
    """Names of the hardware of this process's devices."""
    return [client.hardware(index) for index in range(client.hardware_count())]


__all__ = ["OpSharding", "ShardingType", "XlaShardingSpec"]
