"""Code that works on the part of one device, between two calls: outside of them XLA partitions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_xla import _bindings
from torch_xla._core.device import shardings
from torch_xla._core.execute import parts
from torch_xla._errors import message
from torch_xla.distributed.spmd.marking import mark_sharding, unwrapped, wrapped
from torch_xla.distributed.spmd.mesh import Mesh, MeshError, PartitionSpec, get_global_mesh
from torch_xla.distributed.spmd.op_sharding import OpSharding
from torch_xla.distributed.spmd.xla_sharded_tensor import XLAShardedTensor


def given_or_global(mesh: Mesh | None) -> Mesh:
    """A mesh, or the one of `set_global_mesh`; AssertionError where there is neither."""
    active_mesh = mesh or get_global_mesh()
    if active_mesh is None:
        raise AssertionError(message("spmd", "mesh is None", do="pass a mesh or call set_global_mesh"))
    return active_mesh


def _mark_manual_sharding(t: torch.Tensor) -> XLAShardedTensor:
    global_tensor = unwrapped(t)
    if _bindings.location_of(global_tensor.detach()) is not None:
        raise RuntimeError(
            message("spmd", "got a computed tensor", expected="a pending one", do="call it before the barrier")
        )
    global_tensor.__dict__["_manual"] = True
    return XLAShardedTensor(global_tensor)


def enable_manual_sharding(
    t: torch.Tensor, partition_spec: PartitionSpec, *, mesh: Mesh | None = None
) -> XLAShardedTensor:
    """The part of a tensor that each device has, for code that works per device.

    What is computed from it is of one device's part too, until `disable_manual_sharding`; a value that is still such a
    part at the barrier is the first device's.

    Args:
        t: The tensor.
        partition_spec: See `mark_sharding`.
        mesh: The devices; the global mesh by default.

    Raises:
        RuntimeError: A dimension does not divide.
    """
    active_mesh = given_or_global(mesh)
    marked = mark_sharding(t, active_mesh, partition_spec)
    if active_mesh.size() == 1:
        return marked
    return wrapped(full_to_shard(unwrapped(marked)), active_mesh, partition_spec)


def full_to_shard(t: torch.Tensor) -> torch.Tensor:
    """The part of a split tensor that each device has; RuntimeError where it is not split, or does not divide."""
    number = parts.number_of(t.detach())
    if number in (shardings.REPLICATED, shardings.UNSPECIFIED):
        raise RuntimeError(message("spmd", "got a tensor without a sharding", do="call mark_sharding first"))
    split = shardings.by_number(number)
    if split is not None and not split.fits(t.shape):
        got = f"got a tensor of shape {tuple(t.shape)} for manual sharding as {split.tiles}"
        raise RuntimeError(message("spmd", got, expected="sizes that the tiles divide", do="pad it"))
    part = torch.ops.xla.full_to_shard(t, number)
    part.__dict__["_manual"] = True
    return part


def disable_manual_sharding(
    t: torch.Tensor, partition_spec: PartitionSpec, full_shape: torch.Size, *, mesh: Mesh | None = None
) -> XLAShardedTensor:
    """The whole again, from the parts that the devices have.

    Args:
        t: The part.
        partition_spec: How the whole is split; see `mark_sharding`. Over an axis that it does not name, all devices
            are taken to have the same.
        full_shape: Shape of the whole.
        mesh: The devices; the global mesh by default.

    Raises:
        ValueError: The parts do not make such a whole.
    """
    active_mesh = given_or_global(mesh)
    split = active_mesh.split(tuple(partition_spec))
    shape = OpSharding.of(shardings.number_of(split)).shape_of(t.shape)
    if len(partition_spec) != t.dim() or tuple(full_shape) != shape:
        raise MeshError(
            message("spmd", f"full_shape={tuple(full_shape)}", expected=f"{shape}, of shards {tuple(t.shape)}")
        )
    if active_mesh.size() == 1:
        return mark_sharding(t, active_mesh, partition_spec)
    full_tensor = torch.ops.xla.shard_to_full(unwrapped(t), shardings.number_of(split), list(shape))
    return wrapped(full_tensor, active_mesh, partition_spec)


def shard_to_full(t: torch.Tensor, sharding: OpSharding, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The whole, of a size and split by a sharding, of the parts that devices have.

    RuntimeError where `t` is no part.
    """
    if not getattr(t, "_manual", False):
        raise RuntimeError(message("spmd", "got a tensor that is no shard", do="call enable_manual_sharding first"))
    return torch.ops.xla.shard_to_full(t, sharding.number, list(size))


def all_reduce(reduction: str, t: torch.Tensor, scale: float, groups: Sequence[Sequence[int]]) -> torch.Tensor:
    """Parts reduced, by ``"sum"``, ``"max"`` or ``"min"``, over groups of devices, inside manual sharding."""
    flat = [device for group in groups for device in group]
    return torch.ops.xla.spmd_all_reduce(t, reduction, float(scale), flat, len(groups[0]))


def reduce_scatter(
    reduction: str, t: torch.Tensor, scale: float, dim: int, count: int, groups: Sequence[Sequence[int]]
) -> torch.Tensor:
    """Parts added up over groups of `count` devices, of which each keeps its share of `dim`, inside manual sharding."""
    if t.shape[dim] % count:
        got = f"got {t.shape[dim]} rows to scatter over {count} devices"
        raise RuntimeError(message("spmd", got, expected="a multiple of that", do="pad the rows"))
    flat = [device for group in groups for device in group]
    return torch.ops.xla.spmd_reduce_scatter(t, reduction, float(scale), dim, flat, count)
