"""What a vendor's stack of mid-2026 asks of this package: a plugin, a backend of torch.compile, SPMD recipes, tests.

A line is a name, and how it is called: with how many arguments, and with which by keyword.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from torch_xla import _XLAC, _config, _notices

NAMES = """
torch_xla._XLAC._get_xla_sharding_spec(1)
torch_xla._XLAC._get_xla_tensor_dimension_size(2)
torch_xla._XLAC._init_computation_client(0)
torch_xla._XLAC._set_xla_all_numbers_special_scalars(1)
torch_xla._XLAC._set_xla_custom_op_name_prefix(3)
torch_xla._XLAC._xla_computation_cache_is_initialized(0)
torch_xla._XLAC._xla_device_kind(1)
torch_xla._XLAC._xla_mark_dynamic(2)
torch_xla._XLAC._xla_sync_multi(2 wait)
torch_xla._dynamo.dynamo_bridge.GraphInputMatcher
torch_xla.core.dynamo_bridge.extract_compiled_graph(2)
torch_xla.core.xla_builder
torch_xla.core.xla_model.REDUCE_SUM
torch_xla.core.xla_model.all_gather(2 groups pin_layout)
torch_xla.core.xla_model.all_reduce(2 groups)
torch_xla.core.xla_model.get_memory_info(1)
torch_xla.core.xla_model.get_xla_supported_devices(0)
torch_xla.core.xla_model.mark_step(0)
torch_xla.core.xla_model.set_rng_state(2)
torch_xla.core.xla_model.wait_device_ops(0)
torch_xla.core.xla_model.xla_device(0)
torch_xla.debug.metrics.metric_data(1)
torch_xla.debug.profiler.start_server(1)
torch_xla.debug.profiler.start_trace(1)
torch_xla.debug.profiler.stop_trace(0)
torch_xla.device(1)
torch_xla.device_count(0)
torch_xla.distributed.spmd.Mesh(0 axis_names device_ids mesh_shape)
torch_xla.distributed.spmd.ShardingType
torch_xla.distributed.spmd.clear_sharding(1)
torch_xla.distributed.spmd.get_global_mesh(0)
torch_xla.distributed.spmd.mark_sharding(3)
torch_xla.distributed.spmd.set_global_mesh(1)
torch_xla.experimental.custom_kernel.XLA_LIB
torch_xla.experimental.eager.eager_mode_context(1)
torch_xla.experimental.mark_pattern_utils.StableHLOCompositeBuilder(0 attr name)
torch_xla.experimental.plugins.DevicePlugin(0)
torch_xla.experimental.stablehlo_custom_call.stablehlo_custom_call(4 frontend_attributes)
torch_xla.runtime.clear_computation_cache(0)
torch_xla.runtime.get_num_cached_compilation_graph(0)
torch_xla.runtime.global_ordinal(0)
torch_xla.runtime.global_runtime_device_attributes(0)
torch_xla.runtime.global_runtime_device_count(0)
torch_xla.runtime.initialize_cache(1 readonly)
torch_xla.runtime.runtime.set_device_type(1)
torch_xla.runtime.use_spmd(0)
torch_xla.set_custom_compile_options(1)
torch_xla.sync(0 wait)
""".split("\n")[1:-1]

# Variables that it sets; what has no meaning here is said in docs/devices.md.
VARIABLES = "XLA_HLO_DEBUG XLA_USE_SPMD CONVERT_SHLO_TO_SHARDY XLA_STABLEHLO_COMPILE XLA_ALWAYS_ALLREDUCE".split()


def found(name: str) -> Any:
    """What a name stands for: a module, or an attribute of one."""
    result: Any = importlib.import_module("torch_xla")
    path = ["torch_xla"]
    for part in name.split(".")[1:]:
        path.append(part)
        result = getattr(result, part) if hasattr(result, part) else importlib.import_module(".".join(path))
    return result


@pytest.mark.parametrize("line", NAMES)
def test_names_are_there_with_their_parameters(line: str) -> None:
    name, _, call = line.partition("(")
    value = found(name)
    if call:
        count, *keywords = call.rstrip(")").split()
        inspect.signature(value).bind(*[None] * int(count), **dict.fromkeys(keywords))


def test_variables() -> None:
    text = (Path(__file__).parents[2] / "docs" / "devices.md").read_text()
    known = {option.name for option in _config.options()}
    assert [name for name in VARIABLES if name not in known and f"`{name}`" not in text] == []


def test_what_cannot_be_meant_says_so_when_it_is_called() -> None:
    with pytest.raises(NotImplementedError, match=r"\[dynamo\] got a call of GraphInputMatcher"):
        found("torch_xla._dynamo.dynamo_bridge.GraphInputMatcher")({}, [], [])
    x = torch.ones(3, 2, device="xla")
    _notices.forget("dynamic")
    with pytest.warns(UserWarning, match=r"\[export\] got dimension 1 to be dynamic, which stays 2"):
        _XLAC._xla_mark_dynamic(x, 1)


def test_a_traced_graph_is_one_node() -> None:
    traced = torch.fx.symbolic_trace(lambda x, y: (x * 2 + y, y))
    x, y = torch.rand(3), torch.rand(3)
    compiled = found("torch_xla.core.dynamo_bridge.extract_compiled_graph")(traced, (x.to("xla"), y.to("xla")))
    names = [getattr(node.target, "__name__", "") for node in compiled.graph.nodes if node.op == "call_function"]
    assert isinstance(compiled, torch.fx.GraphModule) and names == ["optimized_mod"]
    for _ in range(2):
        first, second = compiled(x.to("xla"), y.to("xla"))
        assert torch.equal(first.cpu(), x * 2 + y) and torch.equal(second.cpu(), y)
