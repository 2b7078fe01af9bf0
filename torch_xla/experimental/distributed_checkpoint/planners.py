"""Plans what PyTorch's distributed checkpoints write of sharded tensors, and read into them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from torch_xla._errors import message
from torch_xla.distributed.spmd import XLAShard, XLAShardedTensor, wrap_if_sharded
from torch_xla.experimental.distributed_checkpoint._helpers import _CpuShards, _is_sharded_tensor, _plain


def _apart(flat: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sharded entries of a flat state dict, and the others."""
    leaves = {name: wrap_if_sharded(value) for name, value in flat.items()}
    split = {name: x for name, x in leaves.items() if _is_sharded_tensor(x) or isinstance(x, _CpuShards)}
    return split, {name: _plain(x) for name, x in leaves.items() if name not in split}


def _shards(value: XLAShardedTensor | _CpuShards) -> list[XLAShard]:
    """The parts of this process."""
    return value.shards if isinstance(value, _CpuShards) else value.local_shards


def _chunk(where: Sequence[slice]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(
        offsets=torch.Size(s.start for s in where), sizes=torch.Size(s.stop - s.start for s in where)
    )


class SPMDSavePlanner(DefaultSavePlanner):
    """Writes each part of a split tensor by itself; everything else as PyTorch does."""

    def __init__(self) -> None:
        super().__init__(flatten_sharded_tensors=False)
        self.sharded_state_dict: dict[str, Any] = {}
        self.unsharded_state_dict: dict[str, Any] = {}
        self._parts: dict[str, dict[Any, XLAShard]] = {}  # those not written yet, by where they are in the whole

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Takes the state dict; called by `torch.distributed.checkpoint.save`."""
        # The second argument of older versions is the third one.
        super().set_up_planner(state_dict, None, is_coordinator or storage_meta is True)
        self.sharded_state_dict, self.unsharded_state_dict = _apart(self.state_dict)
        self.state_dict = self.unsharded_state_dict

    def create_local_plan(self) -> SavePlan:
        """The plan of what this process writes."""
        plan = super().create_local_plan()
        items = [item for name, value in self.sharded_state_dict.items() for item in self._items(name, value)]
        return dataclasses.replace(plan, items=[*plan.items, *_different(items)])

    def _items(self, name: str, value: XLAShardedTensor | _CpuShards) -> list[WriteItem]:
        sample = value.shards[0].data if isinstance(value, _CpuShards) else value.global_tensor.detach()
        size = value.global_shape if isinstance(value, _CpuShards) else value.shape
        properties = TensorProperties.create_from_tensor(sample)
        items = []
        for i, shard in enumerate(_shards(value)):
            chunk = _chunk(shard.indices)
            data = TensorWriteData(chunk=chunk, properties=properties, size=size)
            items.append(WriteItem(MetadataIndex(name, chunk.offsets, i), WriteItemType.SHARD, tensor_data=data))
        return items

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The values of an item."""
        if index.fqn not in self.sharded_state_dict:
            return super().lookup_object(index)
        if index.fqn not in self._parts:
            shards = _shards(self.sharded_state_dict[index.fqn])
            self._parts[index.fqn] = {_chunk(shard.indices).offsets: shard for shard in shards}
        part = self._parts[index.fqn].pop(index.offset, None)  # its memory is wanted
        if part is None:
            raise RuntimeError(message("checkpoint", f"got {index} twice", expected="each part once"))
        return part.unpadded_data


def _different(items: list[WriteItem]) -> list[WriteItem]:
    """The first copy of each shard; shards without elements are left out."""
    unique_items: dict[Any, WriteItem] = {}
    for item in items:
        if item.tensor_data is not None and item.tensor_data.chunk.sizes.numel():
            unique_items.setdefault(item.index, item)
    return list(unique_items.values())


class SPMDLoadPlanner(DefaultLoadPlanner):
    """Reads into the parts of split tensors, whatever parts were written; into everything else as PyTorch does."""

    def __init__(self) -> None:
        super().__init__(flatten_sharded_tensors=False)
        self.sharded_state_dict: dict[str, XLAShardedTensor] = {}
        self.unsharded_state_dict: dict[str, Any] = {}
        self._parts: dict[str, list[XLAShard]] = {}
        self._missing: dict[str, int] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Takes the state dict; called by `torch.distributed.checkpoint.load`."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.sharded_state_dict, self.unsharded_state_dict = _apart(self.state_dict)
        self.state_dict = self.unsharded_state_dict

    def create_local_plan(self) -> LoadPlan:
        """The plan of what this process reads."""
        assert self.metadata is not None
        plan = create_default_local_load_plan(self.unsharded_state_dict, self.metadata)
        items: list[ReadItem] = []
        for name, value in self.sharded_state_dict.items():
            stored = self.metadata.state_dict_metadata.get(name)
            if not isinstance(stored, TensorStorageMetadata):
                raise RuntimeError(message("checkpoint", f"got no tensor {name} in the checkpoint"))
            if stored.size != value.shape:
                had = f"size {list(stored.size)}, that of the checkpoint"
                raise ValueError(message("checkpoint", f"got {name} of size {list(value.shape)}", expected=had))
            items += create_read_items_for_chunk_list(
                name, stored, [_chunk(shard.indices) for shard in value.local_shards]
            )
        return dataclasses.replace(plan, items=[*plan.items, *items])

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The tensor that a shard is read into."""
        if index.fqn not in self.sharded_state_dict:
            return super().lookup_tensor(index)
        if index.fqn not in self._parts:
            self._parts[index.fqn] = self.sharded_state_dict[index.fqn].local_shards
            self._missing[index.fqn] = sum(part.unpadded_data.numel() for part in self._parts[index.fqn])
        assert index.index is not None
        return self._parts[index.fqn][index.index].data

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Takes notice that an item was read; the last one of a split tensor brings its parts to the devices."""
        name = read_item.dest_index.fqn
        if name not in self.sharded_state_dict:
            return
        self._missing[name] -= math.prod(read_item.lengths)
        if self._missing[name] == 0:
            self.sharded_state_dict[name].load_local_shards_(self._parts.pop(name))
