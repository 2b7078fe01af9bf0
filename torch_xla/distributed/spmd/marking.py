"""Asking for splits: of a tensor, of a value and its gradient, and of what two have in common."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils import hooks

from torch_xla import runtime
from torch_xla._core.device import shardings
from torch_xla._core.execute import parts
from torch_xla._errors import message
from torch_xla.distributed.spmd.mesh import Mesh, MeshError, PartitionSpec
from torch_xla.distributed.spmd.xla_sharded_tensor import XLAShardedTensor


def unwrapped(t: torch.Tensor) -> torch.Tensor:
    """A tensor without its annotation."""
    return t.global_tensor if isinstance(t, XLAShardedTensor) else t


def wrapped(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> XLAShardedTensor:
    """A tensor with its annotation; the same one where it has one already."""
    if not isinstance(t, XLAShardedTensor):
        t = XLAShardedTensor(t)
    t.mesh_shape, t.partition_spec, t._mesh = mesh.mesh_shape, partition_spec, mesh
    return t


def checked(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> int:
    """The placement number for a tensor.

    Raises MeshError where the spec has another rank, or the mesh has no such axes, ValueError where the tensor is on
    another device, and RuntimeError where the devices are not one: there is no SPMD.
    """
    if len(t.shape) != len(partition_spec):
        got = f"Partition spec length ({len(partition_spec)}) should be equal to the input rank ({len(t.shape)})."
        raise MeshError(message("spmd", got))
    if t.device.type != "xla":
        raise ValueError(
            message("spmd", f"got a tensor on {t.device}", expected="one on xla", do="move it with .to('xla')")
        )
    if mesh.size() > 1 and not runtime.is_spmd():
        got = f"got a mesh of {mesh.size()} devices, each of which is an xla device of its own"
        raise RuntimeError(message("spmd", got, do="call torch_xla.runtime.use_spmd() before the first xla tensor"))
    return shardings.number_of(mesh.split(tuple(partition_spec)))


def mark_sharding(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> XLAShardedTensor:
    """Shards a tensor over a mesh from now on: its values, what is written to it, and its gradients.

    Args:
        t: The tensor.
        mesh: The devices.
        partition_spec: Per dimension an axis of the mesh by name or index, a tuple of axes, or None for no split.

    Returns:
        A view of the tensor that knows the annotation.

    Raises:
        ValueError: The spec does not fit, or the tensor is on another device.
        RuntimeError: The tensor is split otherwise already.
    """
    mark(t, checked(t, mesh, partition_spec))
    return wrapped(t, mesh, partition_spec)


def mark(t: torch.Tensor, number: int) -> None:
    """Sets the placement number of a tensor and its gradients from now on.

    RuntimeError if split otherwise already.
    """
    global_tensor = unwrapped(t).detach()
    current = parts.number_of(global_tensor)
    if shardings.by_number(current) is not None and current != number:
        raise RuntimeError(
            message(
                "spmd",
                f"got a tensor that is sharded as {shardings.text_of(current)}, "
                f"to be sharded as {shardings.text_of(number)}",
                expected="one without another sharding",
                do="call clear_sharding first, or annotate_custom_sharding",
            )
        )
    parts.place(global_tensor, number)
    _mark_gradients(t, number)


def _mark_gradients(t: torch.Tensor, number: int) -> None:
    """A gradient that is split as its parameter needs a reduce-scatter where a whole one needs an all-reduce."""
    old = t.__dict__.pop("_split_gradients", None)
    if old is not None:
        old.remove()
    if t.is_leaf and t.requires_grad and number > shardings.EXPLICITLY_REPLICATED:
        t.__dict__["_split_gradients"] = t.register_hook(_gradient_marker(number))


@functools.cache
def _gradient_marker(number: int) -> Any:
    @hooks.unserializable_hook
    def mark(gradient: torch.Tensor) -> None:
        if type(gradient) in (torch.Tensor, XLAShardedTensor) and gradient.device.type == "xla":
            parts.place(gradient.detach(), number)

    return mark


def annotate_custom_sharding(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> XLAShardedTensor:
    """`mark_sharding` as an operation of the program, for tensors that are split already.

    Args:
        t: The tensor.
        mesh: See `mark_sharding`.
        partition_spec: See `mark_sharding`.
    """
    parts.place(unwrapped(t).detach(), checked(t, mesh, partition_spec), recorded=True)
    return wrapped(t, mesh, partition_spec)


def clear_sharding(t: torch.Tensor) -> torch.Tensor:
    """Replicates a tensor again; returns it."""
    global_tensor = unwrapped(t)
    if global_tensor.device.type == "xla":
        parts.place(global_tensor.detach(), shardings.REPLICATED)
    _mark_gradients(t, shardings.REPLICATED)
    return global_tensor


class MarkShardingFunction(torch.autograd.Function):
    """A value that is split, whose gradient is too."""

    @staticmethod
    def forward(ctx: Any, torch_tensor: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> torch.Tensor:
        """Marks the value."""
        ctx.number = checked(torch_tensor, mesh, partition_spec)
        return torch.ops.xla.place(unwrapped(torch_tensor), ctx.number)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Marks the gradient."""
        return torch.ops.xla.place(unwrapped(grad_outputs[0]), ctx.number), None, None


def mark_sharding_with_gradients(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> torch.Tensor:
    """A copy of a tensor that is split, as will be its gradient; the tensor itself is not.

    Args:
        t: The tensor.
        mesh: See `mark_sharding`.
        partition_spec: See `mark_sharding`.
    """
    checked(t, mesh, partition_spec)
    return MarkShardingFunction.apply(t, mesh, partition_spec)
