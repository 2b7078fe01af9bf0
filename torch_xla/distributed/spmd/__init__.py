"""Tensors split over a mesh of devices, by one program that XLA partitions; imported as ``xs``."""

from torch_xla.distributed.spmd.api import auto_policy, xla_distribute_module, xla_distribute_tensor
from torch_xla.distributed.spmd.mesh import HybridMesh, Mesh, get_1d_mesh, get_global_mesh, set_global_mesh
from torch_xla.distributed.spmd.xla_sharded_tensor import XLAShard, XLAShardedTensor
from torch_xla.distributed.spmd.xla_sharding import (
    EinsumLinear,
    MarkShardingFunction,
    ShardingSpec,
    ShardingType,
    XLAPatchedLinear,
    _mark_manual_sharding,
    annotate_custom_sharding,
    apply_backward_optimization_barrier,
    clear_sharding,
    disable_manual_sharding,
    enable_manual_sharding,
    mark_sharding,
    mark_sharding_with_gradients,
    shard_as,
    wrap_if_sharded,
    xla_patched_nn_linear_forward,
)

__all__ = [
    "EinsumLinear",
    "HybridMesh",
    "MarkShardingFunction",
    "Mesh",
    "ShardingSpec",
    "ShardingType",
    "XLAPatchedLinear",
    "XLAShard",
    "XLAShardedTensor",
    "_mark_manual_sharding",
    "annotate_custom_sharding",
    "apply_backward_optimization_barrier",
    "auto_policy",
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
    "xla_distribute_module",
    "xla_distribute_tensor",
    "xla_patched_nn_linear_forward",
]
