"""The names that libraries and scripts look up in torch_xla: each exists, is of its kind, and is held by a table.

`test_signatures.py` compares parameters with the original's; other tests say that the functions work.
"""

from __future__ import annotations

import importlib
import inspect
import warnings

import pytest

# Kind: f function, c class, m module, v value. A name that ends in ! raises for what one process and one device cannot
# do, with a message of ours.
TABLE = {
    "torch_xla": "f:device f:devices f:device_count f:real_devices f:sync f:step f:compile f:manual_seed f:launch "
    "v:__version__ m:_XLAC m:runtime m:core m:debug m:distributed m:utils m:amp m:experimental m:_internal",
    "torch_xla.core.xla_model": "f:mark_step f:xla_device f:optimizer_step f:reduce_gradients f:_fetch_gradients "
    "f:all_reduce f:all_gather f:mesh_reduce f:collective_broadcast f:broadcast_master_param f:rendezvous f:save "
    "f:_maybe_convert_to_cpu f:send_cpu_data_to_device f:is_master_ordinal f:master_print f:get_local_ordinal "
    "f:get_rng_state f:set_rng_state f:get_xla_supported_devices f:set_replication f:get_memory_info "
    "f:add_step_closure f:wait_device_ops v:REDUCE_SUM v:REDUCE_MAX v:REDUCE_MUL v:REDUCE_MIN v:REDUCE_AND "
    "v:REDUCE_OR f:reduce_scatter f:all_to_all f:collective_permute f:do_on_ordinals f:unlazy f:get_ordinal "
    "f:xrt_world_size f:xla_device_hw f:is_xla_tensor f:get_stablehlo",
    "torch_xla.core.functions": "f:all_reduce f:all_gather f:distributed_mm",
    "torch_xla.core.dynamo_bridge": "f:extract_compiled_graph",
    "torch_xla.core.xla_env_vars": "v:PJRT_DEVICE v:TPU_VISIBLE_CHIPS",
    "torch_xla.runtime": "f:world_size f:global_ordinal f:local_ordinal f:host_index f:process_count f:device_type "
    "f:use_spmd! f:is_spmd f:global_runtime_device_count f:initialize_cache f:is_bf16_supported f:using_pjrt "
    "f:get_num_cached_compilation_graph f:process_index f:set_device_type",
    "torch_xla.distributed.xla_multiprocessing": "f:spawn! c:MpModelWrapper c:MpSerialExecutor",
    "torch_xla.distributed.parallel_loader": "c:MpDeviceLoader c:ParallelLoader",
    "torch_xla.distributed.data_parallel": "c:DataParallel! c:Context",
    "torch_xla.distributed.xla_backend": "c:ProcessGroupXla!",
    "torch_xla.distributed.xla_dist": "f:main! f:resolve_and_execute!",
    "torch_xla.distributed.spmd": "c:Mesh c:HybridMesh f:set_global_mesh f:get_global_mesh f:get_1d_mesh "
    "f:mark_sharding! f:clear_sharding c:ShardingSpec! c:ShardingType f:xla_patched_nn_linear_forward "
    "c:XLAShardedTensor c:XLAShard f:xla_distribute_tensor! f:xla_distribute_module f:auto_policy",
    "torch_xla.distributed.fsdp": "c:XlaFullyShardedDataParallel f:checkpoint_module "
    "f:consolidate_sharded_model_checkpoints f:consolidate_sharded_state_dicts!",
    "torch_xla.distributed.fsdp.wrap": "f:size_based_auto_wrap_policy f:transformer_auto_wrap_policy "
    "f:always_wrap_policy f:recursive_wrap",
    "torch_xla.distributed.fsdp.utils": "f:apply_xla_patch_to_nn_linear f:checkpoint_module",
    "torch_xla.distributed.fsdp.consolidate_sharded_ckpts": "f:main",
    "torch_xla.experimental": "f:eager_mode",
    "torch_xla.experimental.custom_kernel": "f:flash_attention c:FlashAttention",
    "torch_xla.experimental.spmd_fully_sharded_data_parallel": "c:SpmdFullyShardedDataParallel",
    "torch_xla.experimental.pjrt": "f:using_pjrt f:world_size f:global_ordinal f:device_type f:broadcast_master_param",
    "torch_xla.experimental.tpu": "f:version f:num_available_devices f:get_tpu_env",
    "torch_xla.experimental.deprecation": "f:deprecated",
    "torch_xla.debug.metrics": "f:metrics_report f:counter_names f:counter_value f:metric_names f:metric_data "
    "f:short_metrics_report f:clear_all",
    "torch_xla.debug.profiler": "f:start_server c:Trace c:StepTrace f:trace! f:trace_detached! f:trace_me "
    "f:start_trace f:stop_trace",
    "torch_xla.amp": "c:autocast c:GradScaler",
    "torch_xla.amp.syncfree": "c:AdamW c:Adam c:SGD",
    "torch_xla.stablehlo": "f:save_torch_model_as_stablehlo f:exported_program_to_stablehlo f:save_as_stablehlo",
    "torch_xla.utils.utils": "f:getenv_as f:for_each_instance c:SampleGenerator c:DataWrapper",
    "torch_xla.utils.serialization": "f:save f:load",
    "torch_xla.utils.checkpoint": "f:checkpoint",
    "torch_xla.utils.checkpoint_tagger": "c:CheckpointTagger",
    "torch_xla.utils.dlpack": "f:to_dlpack f:from_dlpack",
    "torch_xla.utils.keyd_queue": "c:KeydQueue c:Queue",
    "torch_xla._internal.tpu": "f:num_available_devices f:get_tpu_env f:version",
    "torch_xla._internal.rendezvous": "f:pjrt_rendezvous_handler",
    "torch_xla._XLAC": "f:_xla_get_tensor_id f:_xla_sync_multi f:_get_xla_sharding_spec f:_get_xla_tensors_text "
    "f:_get_xla_tensors_hlo f:_xla_get_default_device f:_xla_metrics_report f:_xla_step_marker",
}
KINDS = {"f": callable, "c": inspect.isclass, "m": inspect.ismodule, "v": lambda found: not callable(found)}
CASES = [
    (module, *entry.rstrip("!").split(":"), entry.endswith("!"))
    for module, entries in TABLE.items()
    for entry in entries.split()
]


def calls_that_raise() -> dict[str, object]:
    """By name: a call that asks for several processes or devices."""
    import numpy as np
    import torch

    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr
    from torch_xla.debug import profiler
    from torch_xla.distributed import data_parallel, fsdp, xla_backend, xla_dist, xla_multiprocessing

    def mesh() -> xs.Mesh:
        return xs.Mesh(np.arange(xr.global_runtime_device_count()), (2, 2), ("x", "y"))

    def device_mesh() -> object:
        return type("Mesh", (), {"device_type": "xla", "ndim": 1, "mesh": torch.arange(4), "mesh_dim_names": None})()

    value = torch.ones(4, 4)
    return {
        "torch_xla.runtime.use_spmd": xr.use_spmd,
        "torch_xla.distributed.xla_multiprocessing.spawn": lambda: xla_multiprocessing.spawn(print, nprocs=2),
        "torch_xla.distributed.data_parallel.DataParallel": lambda: data_parallel.DataParallel(
            torch.nn.Linear(1, 1), ["xla:0", "xla:1"]
        ),
        "torch_xla.distributed.xla_backend.ProcessGroupXla": lambda: xla_backend.ProcessGroupXla(None, 0, 2, None),
        "torch_xla.distributed.xla_dist.main": xla_dist.main,
        "torch_xla.distributed.xla_dist.resolve_and_execute": xla_dist.resolve_and_execute,
        "torch_xla.distributed.spmd.mark_sharding": lambda: xs.mark_sharding(value, mesh(), ("x", None)),
        "torch_xla.distributed.spmd.ShardingSpec": lambda: xs.ShardingSpec(mesh(), ("x", None)),
        "torch_xla.distributed.spmd.xla_distribute_tensor": lambda: xs.xla_distribute_tensor(value, device_mesh()),
        "torch_xla.distributed.fsdp.consolidate_sharded_state_dicts": lambda: fsdp.consolidate_sharded_state_dicts(
            [{}, {}], {"world_size": 2}
        ),
        "torch_xla.debug.profiler.trace": lambda: profiler.trace("localhost:1", "/nowhere"),
        "torch_xla.debug.profiler.trace_detached": lambda: profiler.trace_detached("localhost:1", "/nowhere"),
    }


@pytest.mark.parametrize(
    ("module", "kind", "name", "limited"), CASES, ids=[f"{module}.{name}" for module, _, name, _ in CASES]
)
def test_it_exists_and_is_of_its_kind(module: str, kind: str, name: str, limited: bool) -> None:
    found = getattr(importlib.import_module(module), name)
    assert KINDS[kind](found)
    assert limited == (f"{module}.{name}" in calls_that_raise())


@pytest.mark.parametrize("name", [f"{module}.{name}" for module, _, name, limited in CASES if limited])
def test_what_needs_more_than_one_process_or_device_says_so(name: str) -> None:
    with pytest.raises(NotImplementedError, match=r"^\[[a-z_ ]+\] .*(; |, expected )"):
        calls_that_raise()[name]()


def test_older_names_warn_once() -> None:
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr
    from torch_xla import _deprecation
    from torch_xla.experimental import pjrt

    _deprecation._told.clear()
    for call, value in ((xm.get_ordinal, 0), (xm.xrt_world_size, 1), (xr.using_pjrt, True), (pjrt.world_size, 1)):
        with pytest.warns(DeprecationWarning, match=r"^\[deprecated\] .* is an older name; use ") as told:
            assert call() == value
        assert told[0].filename == __file__
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert call() == value


def test_unknown_private_names_say_what_to_use() -> None:
    import torch_xla

    with pytest.raises(AttributeError, match="use the public functions"):
        torch_xla._XLAC._xla_no_such_name  # noqa: B018
