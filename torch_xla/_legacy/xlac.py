"""Private functions of the original that scripts and libraries call all the same, over the public ones."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from torch_xla import _api, _bindings, _metrics, _notices, backends, runtime
from torch_xla._core.device import client
from torch_xla._core.execute import barrier as _barrier
from torch_xla._core.execute import export as _export
from torch_xla._core.execute import region
from torch_xla._core.functions import custom_calls
from torch_xla._legacy import splits as _splits
from torch_xla.core import _barriers, _debug_info, _donation, _operators, _preemption
from torch_xla.core import _lowering_context as lowering  # noqa: F401  # a name of 2.9
from torch_xla.core import xla_model as xm
from torch_xla.debug import metrics as met
from torch_xla.distributed.spmd import manual as _manual
from torch_xla.distributed.spmd import marking as _marking

Tensors = Sequence[torch.Tensor]

# Metrics.
_xla_metrics_report = met.metrics_report
_short_xla_metrics_report = met.short_metrics_report
_xla_counter_names = met.counter_names
_xla_counter_value = met.counter_value
_xla_metric_names = met.metric_names
_xla_metric_data = met.metric_data
_clear_xla_counters = met.clear_counters
_clear_xla_metrics = met.clear_metrics
_get_executed_fallback_ops = met.executed_fallback_ops
_xla_increment_counter = _metrics.count
_xla_get_num_cached_compilation_graph = runtime.get_num_cached_compilation_graph

# Graphs of tensors as text.
_get_xla_tensors_text = partial(_export.graph_text, form="text")
_get_xla_tensors_hlo = partial(_export.graph_text, form="hlo")
_get_xla_tensors_hlo_proto = partial(_export.graph_text, form="hlo_proto")
_get_xla_tensors_dot = partial(_export.graph_text, form="dot")


def _get_stablehlo(
    tensors: Tensors, device: str = "", devices: Sequence[str] = (), emit_bytecode: bool = False
) -> bytes:
    """The StableHLO module that computes the tensors: text in UTF-8, or bytecode."""
    if emit_bytecode:
        return xm.get_stablehlo_bytecode(list(tensors))
    return xm.get_stablehlo(list(tensors)).encode()


_get_xla_tensor_debug_info = _debug_info.tensor_info
_get_xla_tensor_shape_type = _debug_info.type_name
_get_xla_tensor_dimension_size = _debug_info.dimension_size
_get_tensors_handle = _debug_info.handles
_unsafe_buffer_pointer = _debug_info.buffer_pointer
_get_git_revs = _debug_info.revisions


# Tensors.

_xla_dot_general = _operators.dot_general


def _xla_custom_call(*args: Any) -> list[torch.Tensor]:
    """A custom call's results, also where there is one."""
    results = custom_calls.stablehlo_custom_call(*args)
    return results if isinstance(results, list) else [results]


_xla_optimization_barrier_ = _barriers.optimization_barrier_
_xla_get_tensor_id = _xla_get_tensor_view_alias_id = _bindings.tensor_id
_xla_get_cpu_tensors = xm._maybe_convert_to_cpu


def _xla_sync_multi(
    tensors: Tensors, devices: Sequence[str] = (), wait: bool = True, sync_xla_data: bool = True
) -> None:
    """Computes the tensors. Without `sync_xla_data` only buffers that were given away are written over."""
    _barrier.evaluate(list(tensors), wait=wait, donates=_donation.everywhere())


def _xla_step_marker(
    device: str = "", devices: Sequence[str] = (), wait: bool = True, reset_scope: bool = True
) -> None:
    """Issues a barrier."""
    _api.sync(wait, reset_scope)


_xla_wait_device_ops = xm.wait_device_ops

# Donation.

_set_buffer_donation = _donation.give
_get_buffer_donation = _donation.is_given
_is_placecholder = _donation.without_values  # spelled so
_xla_set_enable_alias_with_buffer_donor_config = _donation.set_everywhere
_xla_get_enable_alias_with_buffer_donor_config = _donation.everywhere


# Devices and random state.


def _xla_get_default_device() -> str:
    """Name of the current device."""
    return str(_api.device())


def _xla_set_default_device(device: str) -> str:
    """Makes a device the current one."""
    return str(_api.device(torch.device(device).index or 0))


def _xla_real_devices(devices: Sequence[str | torch.device] = ()) -> list[str]:
    """Names of the hardware of some devices; of all by default."""
    indices = [torch.device(device).index or 0 for device in devices]
    return [client.hardware(index) for index in indices] if indices else _api.real_devices()


def _xla_get_rng_seed(device: str = "") -> int:
    """Random state of a device."""
    return xm.get_rng_state(device or None)


def _xla_set_rng_seed(seed: int, device: str = "") -> None:
    """Sets the random state of a device."""
    xm.set_rng_state(seed, device or None)


def _get_allow_execution() -> bool:
    """Whether graphs may run."""
    return region.allowed


_xla_get_default_device_ordinal = _bindings.current_device
_xla_get_devices = _xla_get_all_devices = _api.real_devices
_xla_num_devices = _api.device_count
_xla_device_kind = xm.xla_device_kind
_xla_memory_info = xm.get_memory_info
_xla_runtime_is_initialized = client.client_started
_get_use_eager_mode = _bindings.is_eager
_set_use_eager_mode = _bindings.set_eager
_set_allow_execution = region.allow

_init_computation_client = client.hardware_devices


def _xla_computation_cache_is_initialized() -> bool:
    """Whether compiled graphs are kept in a folder."""
    from torch_xla._core.compile import cache  # which imports JAX

    return cache.is_kept()


def _set_xla_custom_op_name_prefix(tensor: torch.Tensor, prefix: str, max_call_stack_depth: int = 0) -> bool:
    """Names the operator that computes a tensor in HLO, where ``XLA_HLO_DEBUG=1`` keeps names; whether it is pending.

    `max_call_stack_depth` is not read: ``XLA_IR_DEBUG=1`` says how many lines are kept.
    """
    return _bindings.set_scope_of(tensor, prefix)


def _xla_mark_dynamic(tensor: torch.Tensor, dim: int) -> None:
    """Does nothing but check the dimension: a program is compiled for sizes, and says so in a warning."""
    size = tensor.size(dim)
    if _notices.is_new("dynamic", "_xla_mark_dynamic"):
        text = f"[export] got dimension {dim} to be dynamic, which stays {size}: programs are compiled for sizes; "
        warnings.warn(f"{text}torch_xla.stablehlo exports dynamic dimensions", stacklevel=2)


def _set_xla_all_numbers_special_scalars(on: bool) -> None:
    """Makes all numbers constants of programs from now on, or inputs again."""
    _bindings.set_all_numbers_constant(on)


# Numerics.

_xla_set_mat_mul_precision = backends.set_mat_mul_precision
_xla_get_mat_mul_precision = backends.get_mat_mul_precision


# Splits over a mesh.

OpSharding = _splits.OpSharding
XlaShardingSpec = _splits.XlaShardingSpec
_get_xla_sharding_spec = _splits.get_spec
_get_xla_sharding_specs = _splits.get_specs
_get_xla_op_sharding = _splits.get_op_sharding
_get_xla_sharding_type = _splits.get_type
_xla_mark_sharding = _splits.mark
_xla_annotate_custom_sharding = _splits.annotate
_xla_clear_sharding = _marking.clear_sharding
_get_local_shards = _splits.local_shards
_get_local_shard_replica_and_indices = _splits.local_shard_places
_load_local_shards = _splits.load_local_shards
_global_tensor_from_cpu_shards = _splits.tensor_of_shards
_xla_tensors_from_aten = _splits.tensors_from_aten
_mark_manual_sharding = _manual._mark_manual_sharding
_spmd_full_to_shard_shape = _manual.full_to_shard
_spmd_shard_to_full_shape = _manual.shard_to_full
_xla_spmd_all_reduce = _manual.all_reduce
_xla_spmd_reduce_scatter = _manual.reduce_scatter
_xla_get_runtime_devices = _xla_get_all_runtime_devices = _splits.device_names
_xla_num_runtime_devices = client.hardware_count


_activate_preemption_sync_manager = _preemption.watch
_deactivate_preemption_sync_manager = _preemption.unwatch
_sync_point_reached = _preemption.reached


def _ensure_xla_coordinator_initialized(
    global_rank: int = 0, world_size: int = 1, master_addr: str = "", master_port: str = ""
) -> None:
    """Does nothing: processes meet when they first need to."""


def _xla_get_auto_sharding() -> bool:
    """Whether XLA chooses how parameters are split."""
    return False


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"[_XLAC] got {name!r}, which this package does not have; use the public functions of torch_xla, "
        "torch_xla.core.xla_model, torch_xla.runtime and torch_xla.debug.metrics"
    )
