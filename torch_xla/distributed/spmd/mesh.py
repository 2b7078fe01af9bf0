"""Meshes: the devices of a job as an array with named axes."""

from __future__ import annotations

import ast
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from torch_xla import runtime
from torch_xla._core.device import client
from torch_xla._errors import message

AxisSpec = tuple[int | str, ...] | int | str | None
PartitionSpec = tuple[AxisSpec, ...]


class Mesh:
    """All devices of the job, or the first of them, arranged in an array.

    Args:
        device_ids: Indices of the devices, 0 to their number less one, flat, in row-major order of the mesh.
        mesh_shape: Number of devices along each axis.
        axis_names: Names of the axes.
    """

    def __init__(
        self,
        device_ids: np.ndarray | list[int],
        mesh_shape: tuple[int, ...],
        axis_names: tuple[str, ...] | None = None,
    ) -> None:
        ids = np.array(device_ids)
        count = runtime.global_runtime_device_count()
        size = int(np.prod(mesh_shape))
        # Callers of the original catch AssertionError here.
        if ids.size > count or sorted(ids.tolist()) != list(range(ids.size)):
            raise AssertionError(
                message("mesh", f"device_ids={ids.tolist()}", expected=f"the first of the {count} devices, each once")
            )
        if axis_names is not None and (len(axis_names) != len(mesh_shape) or len(set(axis_names)) != len(axis_names)):
            raise AssertionError(
                message("mesh", f"axis_names={axis_names}", expected=f"{len(mesh_shape)} different names")
            )
        if size != ids.size:
            raise AssertionError(message("mesh", f"mesh_shape={mesh_shape}", expected=f"a product of {ids.size}"))
        self.device_ids = ids
        self.mesh_shape = tuple(int(length) for length in mesh_shape)
        self.axis_names = None if axis_names is None else tuple(axis_names)

    def size(self) -> int:
        """Number of devices."""
        return int(np.prod(self.mesh_shape))

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

        devices = np.array([client.jax_device(int(index)) for index in self.device_ids], dtype=object)
        names = self.axis_names or tuple(map(str, range(len(self.mesh_shape))))
        return jax.sharding.Mesh(devices.reshape(self.mesh_shape), names)

    def axes_of(self, partition_spec: PartitionSpec) -> list[tuple[int, ...]]:
        """The indices of mesh axes over which each dimension is split, after checking them.

        Args:
            partition_spec: One entry per dimension: an axis, several axes, or None.
        """
        axes: list[tuple[int, ...]] = []
        for entry in partition_spec:
            names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            axes.append(tuple(self._axis(name, partition_spec) for name in names))
        used = [axis for group in axes for axis in group]
        if len(set(used)) != len(used):
            raise AssertionError(message("mesh", f"partition_spec={partition_spec}", expected="each axis at most once"))
        return axes

    def _axis(self, name: int | str, partition_spec: PartitionSpec) -> int:
        found = self.get_axis_name_idx(name) if isinstance(name, str) else name
        if found is None or not 0 <= found < len(self.mesh_shape):
            known = list(self.axis_names or ()) + list(range(len(self.mesh_shape)))
            raise ValueError(
                message("mesh", f"axis {name!r} in partition_spec={partition_spec}", expected=f"one of {known}")
            )
        return found

    def __str__(self) -> str:
        return str(
            {"device_ids": self.device_ids.tolist(), "mesh_shape": self.mesh_shape, "axis_names": self.axis_names}
        )

    @classmethod
    def from_str(cls, mesh_str: str) -> Mesh | None:
        """The mesh that `str` described, or None if the text describes none."""
        try:
            parts = ast.literal_eval(mesh_str.removeprefix("Mesh"))
            return cls(np.array(parts["device_ids"]), parts["mesh_shape"], parts["axis_names"])
        except (ValueError, SyntaxError, KeyError, TypeError):
            return None


class HybridMesh(Mesh):
    """A mesh of several slices: neighbours along an axis are in one slice where possible.

    Args:
        ici_mesh_shape: Devices along each axis within a slice.
        dcn_mesh_shape: Slices along each axis; one slice by default.
        axis_names: Names of the axes.
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
            raise AssertionError(
                message("mesh", f"dcn_mesh_shape={slices}", expected=f"{len(ici_mesh_shape)} entries as ici_mesh_shape")
            )
        # Devices are numbered slice by slice: bring each axis of slices beside its axis within a slice.
        ids = np.arange(int(np.prod(slices)) * int(np.prod(ici_mesh_shape))).reshape(*slices, *ici_mesh_shape)
        rank = len(slices)
        order = [axis for pair in zip(range(rank), range(rank, 2 * rank), strict=True) for axis in pair]
        shape = tuple(a * b for a, b in zip(slices, ici_mesh_shape, strict=True))
        self.ici_mesh_shape, self.dcn_mesh_shape = ici_mesh_shape, slices
        super().__init__(ids.transpose(order).reshape(-1), shape, axis_names)


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
