"""Split tensors of a state dict, told from the others, and copies of them on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from torch_xla._torch_internals import pytree
from torch_xla.core import xla_model as xm
from torch_xla.distributed.spmd import ShardingType, XLAShard, XLAShardedTensor, wrap_if_sharded


@dataclass
class _CpuShards:
    """The parts of a split tensor on the host.

    Attributes:
        shards: Those of this process's devices.
        global_shape: Shape of the whole.
    """

    shards: list[XLAShard]
    global_shape: torch.Size


def _is_sharded_tensor(x: Any) -> bool:
    """Whether parts of it are on several devices."""
    return isinstance(x, XLAShardedTensor) and x.sharding_type != ShardingType.REPLICATED


def _plain(x: Any) -> Any:
    return x.global_tensor.detach() if isinstance(x, XLAShardedTensor) else x


def _sharded_cpu_state_dict(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A copy of a state dict on the host: parts of what is split, and the rest as it is."""
    values, structure = pytree.tree_flatten(state_dict)
    leaves = [wrap_if_sharded(x) for x in values]
    cpu_values = iter(xm._maybe_convert_to_cpu([_plain(x) for x in leaves if not _is_sharded_tensor(x)]))
    copied = [_CpuShards(x.local_shards, x.shape) if _is_sharded_tensor(x) else next(cpu_values) for x in leaves]
    copy: dict[str, Any] = pytree.tree_unflatten(copied, structure)
    return copy
