"""Has the functions that `torch.distributed.tensor` calls for meshes of device type ``xla``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torch_xla._errors import message
from torch_xla.distributed import _device_mesh
from torch_xla.distributed.spmd.marking import mark_sharding
from torch_xla.distributed.spmd.mesh import PartitionSpec, of_device_mesh, spec_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


def auto_policy(mod_name: str, mod: torch.nn.Module, mesh: DeviceMesh) -> None:
    """A ``partition_fn`` for `xla_distribute_module` that leaves the choice to XLA."""


convert_to_xla_mesh = of_device_mesh


def convert_to_xla_partition_spec(tensor: torch.Tensor, placements: Sequence[Placement]) -> PartitionSpec:
    """Placements, which say for each axis of the mesh what it splits, by dimension of the tensor.

    Args:
        tensor: The tensor to be split.
        placements: `Shard` or `Replicate`, one per axis of the mesh.
    """
    return spec_of(tensor.dim(), placements)


def xla_distribute_tensor(
    tensor: torch.Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement] | None = None
) -> torch.Tensor:
    """Splits a tensor over a mesh of XLA devices; gives a `DTensor` in a job of processes that are no SPMD.

    Args:
        tensor: The whole tensor, on any device.
        device_mesh: A mesh of device type ``xla`` over all devices.
        placements: One per axis of the mesh; replicated by default.
    """
    if _device_mesh.has_groups():
        return _device_mesh.distribute_tensor(tensor, device_mesh, placements, _device_mesh.source_of_caller())
    if device_mesh.device_type != "xla":
        raise AssertionError(message("spmd", f"got a mesh of {device_mesh.device_type}", expected="device type xla"))
    if type(tensor).__name__ == "DTensor":
        raise ValueError(message("spmd", "got a DTensor", expected="a plain tensor", do="call redistribute on it"))
    if placements is not None and len(placements) != device_mesh.ndim:
        raise AssertionError(
            message("spmd", f"got {len(placements)} placements", expected=f"{device_mesh.ndim}, one per mesh axis")
        )
    mesh = convert_to_xla_mesh(device_mesh)
    spec = convert_to_xla_partition_spec(tensor, placements or [])
    return mark_sharding(tensor.to("xla"), mesh, spec)


def xla_distribute_module(
    module: torch.nn.Module,
    device_mesh: DeviceMesh | None = None,
    partition_fn: Callable[[str, torch.nn.Module, Any], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> torch.nn.Module:
    """Splits the parameters of a module over a mesh of XLA devices.

    Args:
        module: The module; changed in place.
        device_mesh: See `xla_distribute_tensor`.
        partition_fn: Called with name, submodule and mesh for each submodule, to mark its parameters.
        input_fn: ``input_fn(module, inputs, mesh)`` before each forward pass.
        output_fn: ``output_fn(module, outputs, mesh)`` after each forward pass.
    """
    if device_mesh is not None and _device_mesh.has_groups():
        return _device_mesh.distribute_module(module, device_mesh, partition_fn, input_fn, output_fn)
    if partition_fn is auto_policy:
        module = module.to("xla")
    elif partition_fn is not None:
        for name, submodule in module.named_modules():
            partition_fn(name, submodule, device_mesh)
    if input_fn is not None:
        before = _with_mesh("input_fn", input_fn, device_mesh)
        module.register_forward_pre_hook(lambda mod, inputs: before(mod, inputs))
    if output_fn is not None:
        after = _with_mesh("output_fn", output_fn, device_mesh)
        module.register_forward_hook(lambda mod, inputs, outputs: after(mod, outputs))
    return module


def _with_mesh(name: str, fn: Callable[..., Any], mesh: DeviceMesh | None) -> Callable[[Any, Any], Any]:
    """The function of module and values, for functions with or without the module as first parameter."""
    count = len(inspect.signature(fn).parameters)
    if count == 2:
        return lambda mod, values: fn(values, mesh)
    if count == 3:
        return lambda mod, values: fn(mod, values, mesh)
    raise ValueError(f"{name} should take in 3 arguments, but got {count} arguments!")
