"""Meshes: the devices of a job as an array with named axes."""

from __future__ import annotations

import ast
import functools
import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from torch_xla import _events, _metrics, runtime
from torch_xla._core.device import placement, shardings
from torch_xla._errors import message
from torch_xla.distributed.spmd.op_sharding import OpSharding

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

AxisSpec = tuple[int | str, ...] | int | str | None
PartitionSpec = tuple[AxisSpec, ...]


class MeshError(AssertionError, ValueError):
    """A mesh, or a partition spec for one, that cannot be; callers of the original catch AssertionError."""


def _refuse(got: str, expected: str, do: str = "") -> MeshError:
    return MeshError(message("mesh", got, expected=expected, do=do) if do else message("mesh", got, expected=expected))


class Mesh:
    """All devices of the job, arranged in an array; without SPMD also the first of them.

    Args:
        device_ids: Indices of the devices, 0 to their number less one, flat, in row-major order of the mesh.
        mesh_shape: Number of devices along each axis.
        axis_names: Names of the axes.

    Raises:
        MeshError: They are not all devices, each once, or the shape or the names do not fit.
    """

    def __init__(
        self,
        device_ids: np.ndarray | list[int],
        mesh_shape: tuple[int, ...],
        axis_names: tuple[str, ...] | None = None,
    ) -> None:
        ids = np.array(device_ids).reshape(-1)
        count = runtime.global_runtime_device_count()
        size = math.prod(mesh_shape)
        if axis_names is not None and len(axis_names) != len(mesh_shape):
            raise _refuse(
                f"Number of axis names ({len(axis_names)}) must match mesh dimensions ({len(mesh_shape)})",
                "a name for each axis",
            )
        if axis_names is not None and len(set(axis_names)) != len(axis_names):
            raise _refuse(f"Axis names must be unique, got: {axis_names}", "another name for each axis")
        if len(ids) == size and (len(ids) != count if runtime.is_spmd() else len(ids) > count):
            raise _refuse(
                f"Number of device IDs ({len(ids)}) must match the global number of devices ({count})",
                "a mesh over all of them",
            )
        if len(ids) != size:
            raise _refuse(f"Number of device IDs ({len(ids)}) must match mesh size ({size})", "one for each place")
        if len(np.unique(ids)) != len(ids):
            raise _refuse(f"Device IDs must be unique, got: {ids}", "each device once")
        if not all(0 <= device < size for device in ids):
            raise _refuse(f"Device IDs must be less than mesh size ({size}), got: {ids}", "indices of devices")
        self.device_ids = ids
        self.mesh_shape = tuple(int(length) for length in mesh_shape)
        self.axis_names = None if axis_names is None else tuple(axis_names)
        _events.mark("mesh", ids, self.mesh_shape, self.axis_names or tuple(map(str, range(len(mesh_shape)))))

    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.mesh_shape)

    def shape(self) -> OrderedDict[str | int, int]:
        """Length of each axis, by name, or by index where axes have no names."""
        names: Sequence[str | int] = self.axis_names or range(len(self.mesh_shape))
        return OrderedDict(zip(names, self.mesh_shape, strict=True))

    def get_logical_mesh(self) -> np.ndarray:
        """Indices of the devices in the shape of the mesh."""
        return self.device_ids.reshape(self.mesh_shape)

    def get_axis_name_idx(self, name: str) -> int | None:
        """Index of an axis by name, or None."""
        names = self.axis_names or ()
        return names.index(name) if name in names else None

    def get_jax_mesh(self) -> Any:
        """The same mesh as a `jax.sharding.Mesh`; unnamed axes are called by their index."""
        import jax

        all_devices = placement.of(0).devices
        devices = np.array([all_devices[int(index)] for index in self.device_ids], dtype=object)
        names = self.axis_names or tuple(map(str, range(len(self.mesh_shape))))
        return jax.sharding.Mesh(devices.reshape(self.mesh_shape), names)

    def get_op_sharding(self, partition_spec: PartitionSpec) -> OpSharding:
        """The sharding that a partition spec gives a tensor, as an `OpSharding`.

        Args:
            partition_spec: One entry per dimension: an axis, several axes, or None.
        """
        return OpSharding.of(shardings.number_of(self.split(partition_spec)))

    @functools.lru_cache(maxsize=1024)  # noqa: B019  # of few meshes, which live as long as the process
    def split(self, partition_spec: PartitionSpec) -> shardings.TileAssignment:
        """The sharding that a partition spec gives a tensor."""
        _metrics.count("CreateOpSharding")
        axes = self.axes_of(partition_spec)
        used = [axis for group in axes for axis in group]
        order = used + [axis for axis in range(len(self.mesh_shape)) if axis not in used]
        tiles = [math.prod(self.mesh_shape[axis] for axis in group) for group in axes]
        tiling = shardings.tile_assignment(tiles, self.get_logical_mesh().transpose(order).reshape(-1).tolist())
        shardings.note(tiling, self._axes_of_programs())
        return tiling

    def _axes_of_programs(self) -> shardings.Axes:
        """Its axes in a program, unnamed ones by their index."""
        order = () if np.array_equal(self.device_ids, np.arange(self.size())) else tuple(map(int, self.device_ids))
        names = self.axis_names or (f"axis_{i}" for i in range(len(self.mesh_shape)))
        return shardings.Axes(self.mesh_shape, tuple(names), order)

    def axes_of(self, partition_spec: PartitionSpec) -> list[tuple[int, ...]]:
        """The indices of mesh axes over which each dimension is split.

        A spec has an axis, several axes, or None for each. Raises ValueError where it names an axis that the mesh does
        not have, or one twice, or is nested deeper.
        """
        axes: list[tuple[int, ...]] = []
        for entry in partition_spec:
            names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            axes.append(tuple(self._axis(name, partition_spec) for name in names))
        used = [axis for group in axes for axis in group]
        if len(set(used)) != len(used):
            raise _refuse(f"partition_spec={partition_spec}", "each axis at most once")
        return axes

    def _axis(self, name: Any, partition_spec: PartitionSpec) -> int:
        if isinstance(name, tuple):
            raise _refuse(f"partition_spec={partition_spec} with nested tuples", "axes or flat tuples of axes")
        index = self.get_axis_name_idx(name) if isinstance(name, str) else name
        if not isinstance(index, (int, np.integer)) or not 0 <= index < len(self.mesh_shape):
            known_axes = list(self.axis_names or ()) + list(range(len(self.mesh_shape)))
            raise _refuse(f"axis {name!r} in partition_spec={partition_spec}", f"one of {known_axes}")
        return int(index)

    def __str__(self) -> str:
        return str(
            {"device_ids": self.device_ids.tolist(), "mesh_shape": self.mesh_shape, "axis_names": self.axis_names}
        )

    @classmethod
    def from_str(cls, mesh_str: str) -> Mesh | None:
        """The mesh that `str` described, or None if the text describes none."""
        try:
            parts = ast.literal_eval(mesh_str.removeprefix("Mesh"))
            return Mesh(np.array(parts["device_ids"]), parts["mesh_shape"], parts["axis_names"])
        except (ValueError, SyntaxError, KeyError, TypeError):
            return None


class HybridMesh(Mesh):
    """A mesh of several slices: neighbours along an axis are in one slice where possible.

    Args:
        ici_mesh_shape: Devices along each axis within a slice.
        dcn_mesh_shape: Slices along each axis; one slice by default.
        axis_names: Names of the axes.

    Raises:
        ValueError: The number of slices is another.
    """

    def __init__(
        self,
        *,
        ici_mesh_shape: tuple[int, ...],
        dcn_mesh_shape: tuple[int, ...] | None = None,
        axis_names: tuple[str, ...] | None = None,
    ) -> None:
        slices = dcn_mesh_shape or (1,) * len(ici_mesh_shape)
        if len(slices) != len(ici_mesh_shape):
            raise _refuse(f"dcn_mesh_shape={slices}", f"{len(ici_mesh_shape)} entries as ici_mesh_shape")
        device_attributes = runtime.global_runtime_device_attributes()
        attributes = sorted(device_attributes, key=lambda device: int(str(device["name"]).rsplit(":", 1)[1]))
        several = len({device.get("slice_index", 0) for device in attributes}) > 1
        if several and math.prod(slices) == 1:
            raise ValueError(message("mesh", "Provide dcn_mesh_shape to create a mesh for multislice"))
        if not several and math.prod(slices) > 1:
            raise ValueError(message("mesh", "Invalid dcn_mesh_shape for single slice mesh"))
        granules: dict[Any, list[int]] = {}
        for index, device in enumerate(attributes):
            granules.setdefault(device.get("slice_index", 0), []).append(index)
        if len(granules) != math.prod(slices):
            raise ValueError(
                message("mesh", f"Number of slices {len(granules)} must equal the product of dcn_mesh_shape {slices}")
            )
        inside = [
            _within_slice([attributes[i] for i in granules[key]], granules[key], ici_mesh_shape)
            for key in sorted(granules)
        ]
        # Bring each axis of slices beside its axis within a slice.
        ids = np.array(inside).reshape(*slices, *ici_mesh_shape)
        rank = len(slices)
        order = [axis for pair in zip(range(rank), range(rank, 2 * rank), strict=True) for axis in pair]
        shape = tuple(a * b for a, b in zip(slices, ici_mesh_shape, strict=True))
        self.ici_mesh_shape, self.dcn_mesh_shape = ici_mesh_shape, slices
        super().__init__(ids.transpose(order).reshape(-1), shape, axis_names)


def _within_slice(attributes: list[dict[str, Any]], ids: list[int], shape: tuple[int, ...]) -> np.ndarray:
    """The devices of a slice: neighbours in the last axis are neighbours in the torus."""
    if math.prod(shape) != len(ids):
        raise ValueError(
            message("mesh", f"got ici_mesh_shape={shape}", expected=f"a product of {len(ids)}, the devices of a slice")
        )
    if all("coords" in device for device in attributes):
        places = [(*reversed(device["coords"]), device.get("core_on_chip", 0)) for device in attributes]
        ids = [ids[i] for i in sorted(range(len(ids)), key=lambda i: places[i])]
    return np.array(ids).reshape(shape)


_global_mesh: Mesh | None = None


def set_global_mesh(mesh: Mesh) -> None:
    """Makes a mesh the one that `get_global_mesh` returns."""
    global _global_mesh
    _global_mesh = mesh


def get_global_mesh() -> Mesh | None:
    """The mesh that was set, or None."""
    return _global_mesh


def get_1d_mesh(axis_name: str | None = None) -> Mesh:
    """A mesh with all devices along one axis.

    Args:
        axis_name: Name of the axis.
    """
    count = runtime.global_runtime_device_count()
    return Mesh(np.arange(count), (count,), None if axis_name is None else (axis_name,))


def of_device_mesh(mesh: DeviceMesh) -> Mesh:
    """The mesh for a `DeviceMesh` over all devices."""
    return Mesh(mesh.mesh.flatten().tolist(), tuple(mesh.mesh.size()), mesh.mesh_dim_names)


def spec_of(rank: int, placements: Sequence[Placement]) -> PartitionSpec:
    """Placements, one for each axis of the mesh, as a partition spec of a tensor with so many dimensions."""
    axes: list[list[int]] = [[] for _ in range(rank)]
    for axis, kind in enumerate(placements):
        if kind.is_shard():
            axes[kind.dim].append(axis)  # type: ignore[attr-defined]
        elif not kind.is_replicate():
            raise ValueError(f"Unsupported placement type: {type(kind).__name__}")
    return tuple(None if not dim_axes else dim_axes[0] if len(dim_axes) == 1 else tuple(dim_axes) for dim_axes in axes)
