"""Marking tensors as split over a mesh, under the original's path, and splits of what goes to the device."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from torch_xla._core.functions import jax_functions
from torch_xla._errors import message
from torch_xla._torch_internals import pytree
from torch_xla.core import _barriers
from torch_xla.distributed.spmd.inputs import ShardingSpec
from torch_xla.distributed.spmd.linear import (
    EinsumLinear,
    XLAPatchedLinear,
    apply_xla_patch_to_nn_linear,
    xla_patched_nn_linear_forward,
)
from torch_xla.distributed.spmd.manual import _mark_manual_sharding, disable_manual_sharding, enable_manual_sharding
from torch_xla.distributed.spmd.marking import (
    MarkShardingFunction,
    annotate_custom_sharding,
    clear_sharding,
    mark_sharding,
    mark_sharding_with_gradients,
    unwrapped,
)
from torch_xla.distributed.spmd.mesh import (
    HybridMesh,
    Mesh,
    PartitionSpec,
    get_1d_mesh,
    get_global_mesh,
    set_global_mesh,
)
from torch_xla.distributed.spmd.op_sharding import OpSharding, ShardingType
from torch_xla.distributed.spmd.xla_sharded_tensor import XLAShardedTensor

__all__ = [
    "EinsumLinear",
    "HybridMesh",
    "MarkShardingFunction",
    "Mesh",
    "OpSharding",
    "PartitionSpec",
    "ShardingSpec",
    "ShardingType",
    "XLAPatchedLinear",
    "XLAShardedTensor",
    "_mark_manual_sharding",
    "annotate_custom_sharding",
    "apply_backward_optimization_barrier",
    "apply_xla_patch_to_nn_linear",
    "clear_sharding",
    "disable_manual_sharding",
    "enable_manual_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "set_global_mesh",
    "shard_as",
    "wrap_if_sharded",
    "xla_patched_nn_linear_forward",
]

A = TypeVar("A")
B = TypeVar("B")


def wrap_if_sharded(x: Any) -> Any:
    """An `XLAShardedTensor` for a tensor that is split, else the argument."""
    if isinstance(x, torch.Tensor) and not isinstance(x, XLAShardedTensor) and x.device.type == "xla":
        wrapped = XLAShardedTensor(x)
        return wrapped if wrapped.sharding_spec else x
    return x


def shard_as(a: A, b: B) -> tuple[A, B]:
    """Gives the tensors in two containers of one structure the same shardings, which XLA chooses.

    Args:
        a: Any nesting of containers.
        b: The same nesting.
    """
    ours, structure = pytree.tree_flatten(a)
    others, other_structure = pytree.tree_flatten(b)
    if structure != other_structure:
        raise AssertionError(
            message("spmd", f"a and b must have the same structure. got {structure}, {other_structure}")
        )
    pairs = [(x, y) if not isinstance(x, torch.Tensor) else _shard_as(x, y) for x, y in zip(ours, others, strict=True)]
    return (
        pytree.tree_unflatten([x for x, _ in pairs], structure),
        pytree.tree_unflatten([y for _, y in pairs], structure),
    )


def _shard_as(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from torch_xla.ops.sharding_group import shard_alike

    x, y = unwrapped(x), unwrapped(y)
    name = jax_functions.trace(shard_alike, jax_functions.metas_of((x, y)), "shard_as")
    first, second = jax_functions.call(name, (x, y))
    return first, second


def apply_backward_optimization_barrier(m: torch.nn.Module) -> None:
    """Keeps XLA from merging a module's backward pass with others': merged ones gather all at once.

    Args:
        m: The module.
    """

    def finish(gradient: torch.Tensor) -> None:
        gradients = [param.grad for param in m.parameters() if param.grad is not None]
        _barriers.optimization_barrier_([*gradients, gradient])

    def watch(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf:
                value.register_hook(finish)

    m.register_forward_pre_hook(watch, with_kwargs=True)
