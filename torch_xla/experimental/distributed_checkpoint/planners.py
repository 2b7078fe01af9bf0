"""What PyTorch's distributed checkpoints write of split tensors, and read into them."""

from __future__ import annotations

import dataclasses
import io
import math
from collections import ChainMap
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import default_planner as defaults
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.utils import find_state_dict_object

from torch_xla._errors import message
from torch_xla._legacy import splits as legacy_splits
from torch_xla._torch_internals import dedup_save_plans, flatten_state_dict, set_element
from torch_xla.distributed.spmd import XLAShard, XLAShardedTensor, wrap_if_sharded
from torch_xla.experimental.distributed_checkpoint._helpers import _CpuShards, _is_sharded_tensor, _plain


def _apart(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """What is split, what is not, and where each was in the nested dict."""
    flat, mappings = flatten_state_dict(state_dict)
    leaves = {name: wrap_if_sharded(value) for name, value in flat.items()}
    split = {name: x for name, x in leaves.items() if _is_sharded_tensor(x) or isinstance(x, _CpuShards)}
    return split, {name: _plain(x) for name, x in leaves.items() if name not in split}, mappings


def _indices(value: XLAShardedTensor | _CpuShards) -> list[list[slice]]:
    """What each part of this process is of the whole, without copying the parts."""
    if isinstance(value, _CpuShards):
        return [shard.indices for shard in value.shards]
    return [where for _, where in legacy_splits.local_shard_places([value.global_tensor])[0]]


def _chunk(where: Sequence[slice]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(
        offsets=torch.Size(s.start for s in where), sizes=torch.Size(s.stop - s.start for s in where)
    )


class SPMDSavePlanner(SavePlanner):
    """Writes each part of a split tensor by itself; everything else as PyTorch does."""

    def __init__(self) -> None:
        self.is_coordinator = False
        self.mappings: dict[str, Any] = {}
        self.sharded_state_dict: dict[str, Any] = {}
        self.unsharded_state_dict: dict[str, Any] = {}
        self._parts: dict[str, list[XLAShard | None]] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """Takes the state dict; called by `torch.distributed.checkpoint.save`."""
        self.is_coordinator = is_coordinator or storage_meta is True  # the second argument of older versions
        self.sharded_state_dict, self.unsharded_state_dict, self.mappings = _apart(state_dict)

    def create_local_plan(self) -> SavePlan:
        """What this process writes."""
        plan = defaults.create_default_local_save_plan(self.unsharded_state_dict, self.is_coordinator)
        items = [item for name, value in self.sharded_state_dict.items() for item in self._items(name, value)]
        return dataclasses.replace(plan, items=[*plan.items, *items], planner_data=self.mappings)

    def _items(self, name: str, value: XLAShardedTensor | _CpuShards) -> list[WriteItem]:
        sample = value.shards[0].data if isinstance(value, _CpuShards) else value.global_tensor.detach()
        size = value.global_shape if isinstance(value, _CpuShards) else value.shape
        properties = TensorProperties.create_from_tensor(sample)
        items = []
        for i, where in enumerate(_indices(value)):
            chunk = _chunk(where)
            data = TensorWriteData(chunk=chunk, properties=properties, size=size)
            items.append(WriteItem(MetadataIndex(name, chunk.offsets, i), WriteItemType.SHARD, tensor_data=data))
        return items

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """What all processes write: of equal parts one."""
        local_plans = [dataclasses.replace(plan, items=_different(plan.items)) for plan in all_plans]
        plans, metadata = defaults.create_default_global_save_plan(
            dedup_save_plans(local_plans), rewrite_index_hints=False
        )
        merged = dict(ChainMap(*(plan.planner_data for plan in plans)))
        return plans, dataclasses.replace(metadata, planner_data=merged)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Takes what this process is to write."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The values of an item."""
        index = write_item.index
        if index.fqn not in self.sharded_state_dict:
            value = find_state_dict_object(self.unsharded_state_dict, index)
            if write_item.type != WriteItemType.BYTE_IO:
                tensor: torch.Tensor = value
                return tensor
            buffer = io.BytesIO()
            torch.save(value, buffer)
            return buffer
        if index.fqn not in self._parts:
            sharded = self.sharded_state_dict[index.fqn]
            self._parts[index.fqn] = list(sharded.shards if isinstance(sharded, _CpuShards) else sharded.local_shards)
        assert index.index is not None
        part = self._parts[index.fqn][index.index]
        if part is None:
            raise RuntimeError(message("checkpoint", f"got {index} twice", expected="each part once"))
        self._parts[index.fqn][index.index] = None  # its memory is wanted
        return part.unpadded_data


def _different(items: list[WriteItem]) -> list[WriteItem]:
    """Of the copies of a part the first; parts without elements are left out."""
    unique_items: dict[Any, WriteItem] = {}
    for item in items:
        data = item.tensor_data
        if data is not None and item.type == WriteItemType.SHARD and not math.prod(data.chunk.sizes):
            continue
        unique_items.setdefault((item.index.fqn, item.index.offset), item)
    return list(unique_items.values())


class SPMDLoadPlanner(LoadPlanner):
    """Reads into the parts of split tensors, whatever parts were written; into everything else as PyTorch does."""

    def __init__(self) -> None:
        self.metadata: Metadata | None = None
        self.is_coordinator = False
        self.original_state_dict: dict[str, Any] = {}
        self.mappings: dict[str, Any] = {}
        self.sharded_state_dict: dict[str, XLAShardedTensor] = {}
        self.unsharded_state_dict: dict[str, Any] = {}
        self._parts: dict[str, list[XLAShard]] = {}
        self._missing: dict[str, int] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Takes the state dict; called by `torch.distributed.checkpoint.load`."""
        self.metadata, self.is_coordinator, self.original_state_dict = metadata, is_coordinator, state_dict
        self.sharded_state_dict, self.unsharded_state_dict, self.mappings = _apart(state_dict)

    def create_local_plan(self) -> LoadPlan:
        """What this process reads."""
        assert self.metadata is not None
        plan = defaults.create_default_local_load_plan(self.unsharded_state_dict, self.metadata)
        items: list[ReadItem] = []
        for name, value in self.sharded_state_dict.items():
            stored = self.metadata.state_dict_metadata.get(name)
            if not isinstance(stored, TensorStorageMetadata):
                raise RuntimeError(message("checkpoint", f"got no tensor {name} in the checkpoint"))
            items += create_read_items_for_chunk_list(name, stored, [_chunk(where) for where in _indices(value)])
        return dataclasses.replace(plan, items=[*plan.items, *items])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """What all processes read."""
        return defaults.create_default_global_load_plan(global_plan)

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Takes what this process is to read."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Takes what is no tensor."""
        name = read_item.dest_index.fqn
        set_element(self.original_state_dict, self.mappings[name], torch.load(value, weights_only=False))

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Where an item is to be read to."""
        index = read_item.dest_index
        if index.fqn not in self.sharded_state_dict:
            tensor = find_state_dict_object(self.unsharded_state_dict, index)
        else:
            if index.fqn not in self._parts:
                self._parts[index.fqn] = self.sharded_state_dict[index.fqn].local_shards
                self._missing[index.fqn] = sum(part.unpadded_data.numel() for part in self._parts[index.fqn])
            assert index.index is not None
            tensor = self._parts[index.fqn][index.index].data
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, start, length)
        destination: torch.Tensor = tensor.detach()
        return destination

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Takes notice that an item was read; the last one of a split tensor brings its parts to the devices."""
        name = read_item.dest_index.fqn
        if name not in self.sharded_state_dict:
            return
        self._missing[name] -= math.prod(read_item.lengths)
        if self._missing[name] == 0:
            self.sharded_state_dict[name].load_local_shards_(self._parts.pop(name))
