"""Tensors split over a mesh of devices, by one program that XLA partitions; imported as ``xs``."""

from torch_xla.distributed.spmd import xla_sharding as _marks
from torch_xla.distributed.spmd.api import auto_policy, xla_distribute_module, xla_distribute_tensor
from torch_xla.distributed.spmd.xla_sharded_tensor import XLAShard
from torch_xla.distributed.spmd.xla_sharding import *  # noqa: F403

__all__ = ["XLAShard", "auto_policy", "xla_distribute_module", "xla_distribute_tensor"]
__all__ += _marks.__all__
