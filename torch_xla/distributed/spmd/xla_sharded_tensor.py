"""Tensors with a sharding annotation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from torch_xla._core.device import client, shardings
from torch_xla._core.execute import parts
from torch_xla._errors import message
from torch_xla.distributed.spmd.mesh import Mesh, PartitionSpec, of_device_mesh, spec_of
from torch_xla.distributed.spmd.op_sharding import OpSharding, ShardingType

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass
class XLAShard:
    """One device's part of a tensor, as it was when it was asked for.

    Attributes:
        data: The part, on the host; filled up with zeros where the dimension does not divide.
        indices: The slices of the whole that it holds, or an ellipsis for all of it.
        shard_device: The device.
        replica_id: Which of several equal copies this is.
    """

    data: torch.Tensor
    indices: Any
    shard_device: str
    replica_id: int

    def _unpadded(self) -> Any:
        return ... if self.indices is ... else tuple(slice(0, s.stop - s.start) for s in self.indices)

    @property
    def unpadded_data(self) -> torch.Tensor:
        """The part without the padding of uneven splits."""
        return self.data[self._unpadded()]

    @unpadded_data.setter
    def unpadded_data(self, values: torch.Tensor) -> None:
        self.data[self._unpadded()] = values


class XLAShardedTensor(torch.Tensor):
    """A view of a tensor that knows its mesh and partition spec. Operations on it give tensors of this class."""

    mesh_shape: tuple[int, ...] | None = None
    partition_spec: PartitionSpec | None = None
    _mesh: Mesh | None = None
    _manual: bool = False

    @staticmethod
    def __new__(
        cls,
        elem: torch.Tensor,
        mesh_shape: tuple[int, ...] | None = None,
        partition_spec: PartitionSpec | None = None,
    ) -> XLAShardedTensor:
        """Views ``elem``."""
        sharded = elem.as_subclass(cls)
        sharded.mesh_shape = mesh_shape or getattr(elem, "mesh_shape", None)
        sharded.partition_spec = partition_spec or getattr(elem, "partition_spec", None)
        sharded._mesh = None
        sharded._manual = getattr(elem, "_manual", False)
        return sharded

    @property
    def global_tensor(self) -> torch.Tensor:
        """The whole as a plain tensor; both share their values."""
        plain = self.as_subclass(torch.Tensor)
        if self._manual:
            plain.__dict__["_manual"] = True
        return plain

    @property
    def local_shards(self) -> list[XLAShard]:
        """The parts on devices of this process."""
        global_tensor = self.global_tensor.detach()
        is_replicated = shardings.by_number(parts.number_of(global_tensor)) is None
        return [
            XLAShard(
                part.values,
                ... if is_replicated else list(part.where),
                f"{client.device_type()}:{part.device}",
                part.device if is_replicated else part.copy,
            )
            for part in parts.of_tensor(global_tensor)
        ]

    def load_local_shards_(self, shards: Sequence[XLAShard]) -> None:
        """Replaces the values of the parts on devices of this process.

        Args:
            shards: A part for each of these devices, of the sizes that `local_shards` gives.

        Raises:
            RuntimeError: The tensor is not split, or there are too few parts, or they have other sizes.
        """
        load_parts(self.global_tensor.detach(), [s.data for s in shards], [s.shard_device for s in shards])

    @property
    def sharding_type(self) -> ShardingType:
        """The kind of its sharding."""
        if self._manual:
            return ShardingType.MANUAL
        return OpSharding.of(parts.number_of(self.global_tensor)).type

    @property
    def sharding_spec(self) -> str:
        """The annotation in XLA's notation."""
        if self._manual:
            return "{manual}"
        return shardings.text_of(parts.number_of(self.global_tensor))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"XLAShardedTensor({self.global_tensor!r})"

    # What a `DTensor` has.

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh as a `DeviceMesh`.

        Raises:
            ValueError: It is not known.
        """
        from torch.distributed.device_mesh import DeviceMesh

        from torch_xla import runtime

        if self.mesh_shape is None:
            raise ValueError(message("spmd", "mesh_shape must be specified", do="mark_sharding gives such a tensor"))
        devices = torch.arange(runtime.global_runtime_device_count()).reshape(self.mesh_shape)
        return DeviceMesh("xla", devices, _init_backend=False)

    @property
    def placements(self) -> tuple[Any, ...]:
        """The placement of each mesh axis, as in `DTensor`.

        Raises:
            ValueError: It is not known.
        """
        from torch.distributed.tensor import Replicate, Shard

        if self.mesh_shape is None or self.partition_spec is None:
            text = "Placements not available: XLAShardedTensor requires mesh_shape and partition_spec to be set"
            raise ValueError(message("spmd", text, do="use mark_sharding"))
        axis_placements: list[Any] = [Replicate() for _ in self.mesh_shape]
        names = self._mesh
        for dim, entry in enumerate(self.partition_spec):
            for axis in entry if isinstance(entry, tuple) else () if entry is None else (entry,):
                index = names.get_axis_name_idx(axis) if isinstance(axis, str) and names is not None else axis
                axis_placements[int(index)] = Shard(dim)  # type: ignore[arg-type]
        return tuple(axis_placements)

    @property
    def _spec(self) -> Any:
        from torch_xla._torch_internals import DTensorSpec, TensorMeta

        global_tensor = self.global_tensor
        meta = TensorMeta(global_tensor.shape, global_tensor.stride(), global_tensor.dtype)
        return DTensorSpec(mesh=self.device_mesh, placements=self.placements, tensor_meta=meta)

    def invalidate_spec_cache(self) -> None:
        """Does nothing: what it is split like is read when it is asked for."""

    def full_tensor(self) -> torch.Tensor:
        """The whole, on every device."""
        return torch.ops.xla.place(self.global_tensor, shardings.EXPLICITLY_REPLICATED)

    def to_local(self) -> torch.Tensor:
        """The whole as a plain tensor: with SPMD a process sees one device that has all of it."""
        return self.global_tensor

    def redistribute(
        self, device_mesh: Mesh | DeviceMesh, placements: Sequence[Any], *, async_op: bool = False
    ) -> XLAShardedTensor:
        """The tensor split otherwise.

        Args:
            device_mesh: The devices.
            placements: What each axis of the mesh splits.
            async_op: Whether the tensor itself is to stay as it is.

        Raises:
            ValueError: There is not one placement for each axis.
            NotImplementedError: One is a partial sum.
            IndexError: One splits a dimension that the tensor does not have.
        """
        mesh = device_mesh if isinstance(device_mesh, Mesh) else of_device_mesh(device_mesh)
        if len(placements) != len(mesh.mesh_shape):
            got = f"Number of placements ({len(placements)}) must match mesh dimensions ({len(mesh.mesh_shape)})"
            raise ValueError(message("spmd", got))
        for placement in placements:
            if placement.is_partial():
                got = "Partial placement is not yet implemented"
                raise NotImplementedError(message("spmd", got, expected="Shard or Replicate"))
            if placement.is_shard() and not -self.dim() <= placement.dim < self.dim():
                got = f"Shard dimension {placement.dim} is out of bounds for tensor with {self.dim()} dimensions"
                raise IndexError(message("spmd", got))
        spec = spec_of(self.dim(), placements)
        global_tensor = self.global_tensor
        result = XLAShardedTensor(global_tensor.clone() if async_op else global_tensor, mesh.mesh_shape, spec)
        parts.place(result.global_tensor.detach(), shardings.number_of(mesh.split(spec)), recorded=True)
        result._mesh = mesh
        return result


def load_parts(tensor: torch.Tensor, values: Sequence[torch.Tensor], devices: Sequence[str]) -> None:
    """Replaces the values of the parts that this process has of a tensor, by CPU tensors for devices in their order.

    Raises RuntimeError where the tensor is not split, there are too few parts, or they have other sizes.
    """
    from torch_xla import _bindings

    split = shardings.by_number(parts.number_of(tensor))
    if split is None:
        raise RuntimeError(message("spmd", "got shards for a tensor without a sharding", do="call mark_sharding first"))
    local = {f"{client.device_type()}:{part.device}": part.values.shape for part in parts.of_tensor(tensor)}
    if sorted(devices) != sorted(local):
        raise RuntimeError(
            message("spmd", f"got shards of {sorted(devices)}", expected=f"one of each of {list(local)}")
        )
    for value, device in zip(values, devices, strict=True):
        if value.shape != local[device] or value.device.type != "cpu":
            got = f"got a shard of shape {tuple(value.shape)} on {value.device} for {device}"
            raise RuntimeError(message("spmd", got, expected=f"{tuple(local[device])} on the host"))
    values_by_device = dict(zip(devices, values, strict=True))
    ordered = [values_by_device[device].to(tensor.dtype) for device in local]
    buffer = parts.buffer_of(ordered, split, tuple(tensor.shape), tensor.device.index)
    _bindings.replace_buffer(tensor, buffer, shardings.number_of(split))
