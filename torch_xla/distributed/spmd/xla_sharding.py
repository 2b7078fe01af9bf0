"""Marking tensors as split over a mesh. On a mesh of one device a split changes nothing but is checked all the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
import torch.utils._pytree as pytree

from torch_xla import _api
from torch_xla._errors import message
from torch_xla.distributed.spmd.mesh import Mesh, PartitionSpec
from torch_xla.distributed.spmd.xla_sharded_tensor import ShardingType as ShardingType
from torch_xla.distributed.spmd.xla_sharded_tensor import XLAShardedTensor

A = TypeVar("A")
B = TypeVar("B")


def _missing(what: str) -> NoReturn:
    raise NotImplementedError(
        message("spmd", what, expected="a mesh of one device in this version", do="start with CPU_NUM_DEVICES=1")
    )


def _check(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> None:
    if len(t.shape) != len(partition_spec):
        raise AssertionError(
            message(
                "spmd",
                f"Partition spec length ({len(partition_spec)}) should be equal to the input rank ({len(t.shape)}).",
            )
        )
    mesh.axes_of(partition_spec)
    if mesh.size() > 1:
        _missing(f"got a mesh of {mesh.size()} devices")


def mark_sharding(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> XLAShardedTensor:
    """Asks for a tensor to be split over a mesh.

    Args:
        t: The tensor.
        mesh: The devices.
        partition_spec: Per dimension an axis of the mesh by name or index, a tuple of axes, or None for no split.

    Returns:
        A view of the tensor that knows the annotation.
    """
    _check(t, mesh, partition_spec)
    return XLAShardedTensor(_unwrapped(t), mesh_shape=mesh.mesh_shape, partition_spec=partition_spec)


def _unwrapped(t: torch.Tensor) -> torch.Tensor:
    return t.global_tensor if isinstance(t, XLAShardedTensor) else t


class MarkShardingFunction(torch.autograd.Function):
    """`mark_sharding` of a value and of its gradient."""

    @staticmethod
    def forward(ctx: Any, torch_tensor: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> torch.Tensor:
        """Marks the value."""
        ctx.partition_spec, ctx.mesh = partition_spec, mesh
        return _unwrapped(mark_sharding(torch_tensor.clone(), mesh, partition_spec))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Marks the gradient."""
        return _unwrapped(mark_sharding(grad_outputs[0].clone(), ctx.mesh, ctx.partition_spec)), None, None


def mark_sharding_with_gradients(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> torch.Tensor:
    """A copy of a tensor that is marked, as will be its gradient; the tensor itself is not.

    Args:
        t: The tensor.
        mesh: See `mark_sharding`.
        partition_spec: See `mark_sharding`.
    """
    _check(t, mesh, partition_spec)
    return MarkShardingFunction.apply(t, mesh, partition_spec)


def clear_sharding(t: torch.Tensor) -> torch.Tensor:
    """The tensor without an annotation."""
    return _unwrapped(t)


def wrap_if_sharded(x: A) -> A:
    """An `XLAShardedTensor` for a tensor that is split, else the argument: on one device nothing is split."""
    return x


def shard_as(a: A, b: B) -> tuple[A, B]:
    """Asks for equal splits of the tensors in two containers of one structure.

    Args:
        a: Any nesting of containers.
        b: The same nesting.
    """
    if pytree.tree_structure(a) != pytree.tree_structure(b):
        raise AssertionError(message("spmd", "a and b must have the same structure"))
    return a, b


def annotate_custom_sharding(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> XLAShardedTensor:
    """`mark_sharding` as an operation of the program, for tensors that have an annotation already."""
    return mark_sharding(t, mesh, partition_spec)


def _mark_manual_sharding(t: torch.Tensor) -> XLAShardedTensor:
    return XLAShardedTensor(_unwrapped(t))


def enable_manual_sharding(
    t: torch.Tensor, partition_spec: PartitionSpec, *, mesh: Mesh | None = None
) -> XLAShardedTensor:
    """The part of a tensor that belongs to this device, for code that works per device.

    Args:
        t: The tensor.
        partition_spec: See `mark_sharding`.
        mesh: The devices; the global mesh by default.
    """
    return mark_sharding(t, given_or_global(mesh), partition_spec)


def disable_manual_sharding(
    t: torch.Tensor, partition_spec: PartitionSpec, full_shape: torch.Size, *, mesh: Mesh | None = None
) -> XLAShardedTensor:
    """The whole again, from the part that belongs to this device.

    Args:
        t: The part.
        partition_spec: See `mark_sharding`.
        full_shape: Shape of the whole.
        mesh: The devices; the global mesh by default.
    """
    if tuple(full_shape) != tuple(t.shape):
        raise AssertionError(message("spmd", f"full_shape={tuple(full_shape)}", expected=f"{tuple(t.shape)}"))
    return mark_sharding(t, given_or_global(mesh), partition_spec)


def given_or_global(mesh: Mesh | None) -> Mesh:
    """A mesh, or the one of `set_global_mesh`.

    Raises:
        AssertionError: There is neither.
    """
    from torch_xla.distributed.spmd.mesh import get_global_mesh

    found = mesh or get_global_mesh()
    if found is None:
        raise AssertionError(message("spmd", "mesh is None", do="pass a mesh or call set_global_mesh"))
    return found


@dataclass
class ShardingSpec:
    """How the batches of a loader are split.

    Attributes:
        mesh: The devices.
        partition_spec: See `mark_sharding`.
        minibatch: Whether each host gives its part of the batch only.
    """

    mesh: Mesh
    partition_spec: PartitionSpec
    minibatch: bool | None = False

    def __post_init__(self) -> None:
        self.mesh.axes_of(self.partition_spec)
        if self.mesh.size() > 1:
            _missing(f"got a ShardingSpec over {self.mesh.size()} devices")

    def can_apply(self, t: torch.Tensor) -> bool:
        """Whether the tensor has as many dimensions as the spec has entries."""
        return len(t.shape) == len(self.partition_spec)

    def apply(self, t: torch.Tensor) -> None:
        """Marks a tensor on the current device."""
        if t.device != _api.device():
            raise AssertionError(message("spmd", f"got a tensor on {t.device}", expected=str(_api.device())))
        mark_sharding(t, self.mesh, self.partition_spec)


class XLAPatchedLinear(torch.autograd.Function):
    """`torch.nn.functional.linear`, which keeps the dimensions of its input apart on this device by itself."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """The product."""
        if torch.is_autocast_enabled("xla"):
            dtype = torch.get_autocast_dtype("xla")
            input, weight = input.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        ctx.save_for_backward(input, weight, bias)
        with torch.autocast("xla", enabled=False):
            return torch.nn.functional.linear(input, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of those that need one."""
        tensors: list[Any] = [
            t if t is None else t.detach().requires_grad_(needed)
            for t, needed in zip(ctx.saved_tensors, (*ctx.needs_input_grad, False), strict=False)
        ]
        input, weight, bias = tensors
        with torch.enable_grad(), torch.autocast("xla", enabled=False):
            product = torch.nn.functional.linear(input, weight, bias)
        wanted = [t for t in tensors if t is not None and t.requires_grad]
        grads = iter(torch.autograd.grad(product, wanted, grad_outputs))
        given = [next(grads) if t is not None and t.requires_grad else None for t in tensors]
        return tuple(given[: len(ctx.needs_input_grad)])


def xla_patched_nn_linear_forward(m: torch.nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """The forward function of a linear layer through `XLAPatchedLinear`."""
    return XLAPatchedLinear.apply(input, m.weight, m.bias)


class EinsumLinear(torch.nn.Linear):
    """A linear layer through `XLAPatchedLinear`."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The product."""
        return XLAPatchedLinear.apply(input, self.weight, self.bias)


def apply_xla_patch_to_nn_linear(module: torch.nn.Module) -> torch.nn.Module:
    """Makes every `torch.nn.Linear` inside a module an `EinsumLinear`, parameters and hooks included."""
    for layer in module.modules():
        if type(layer) is torch.nn.Linear:
            layer.__class__ = EinsumLinear
    return module


def apply_backward_optimization_barrier(m: torch.nn.Module) -> None:
    """Asks that the backward passes of the modules inside a module are not merged: on one device they need not be."""
