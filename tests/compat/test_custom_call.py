"""Custom calls: in the program, run by the backend, in exported modules; and operators that callers define."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from probes import python

import torch_xla.core.xla_builder as xb
import torch_xla.core.xla_model as xm
from torch_xla import _XLAC
from torch_xla._internal.jax_workarounds import requires_jax
from torch_xla.core.xla_model import XLA_LIB
from torch_xla.experimental.stablehlo_custom_call import place_to_device, place_to_host, stablehlo_custom_call
from torch_xla.stablehlo import StableHLOExportOptions, exported_program_to_stablehlo


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("custom_calls", "DEF") as scoped:
        yield scoped


def test_a_target_of_the_backend_runs() -> None:
    factor = torch.randn(4, 4).tril(-1) + 3 * torch.eye(4)
    x = (factor @ factor.mT).to("xla")
    # Rows are LAPACK's columns: its lower triangle is our upper one.
    result, info = stablehlo_custom_call(
        (x,), "lapack_spotrf_ffi", [x.shape, ()], [x.dtype, torch.int32], False, "{uplo = 76 : ui8}", 4
    )
    assert info.item() == 0
    torch.testing.assert_close(result.cpu().triu().mT, factor)


def test_what_a_call_says_is_in_the_program() -> None:
    x = torch.ones(3, device="xla")
    results = _XLAC._xla_custom_call(
        [x, x + 1], "target", [(2,), [3, 4]], [torch.int8, torch.bfloat16], True, "text", 2, {"b": "c", "a": "d"}
    )
    assert [(t.shape, t.dtype) for t in results] == [((2,), torch.int8), ((3, 4), torch.bfloat16)]
    line = next(line for line in xm.get_stablehlo(results).splitlines() if "stablehlo.custom_call" in line)
    for part in (
        "@target(", 'backend_config = "text"', "has_side_effect = true", "api_version = 2",
        'mhlo.frontend_attributes = {a = "d", b = "c"}', "tuple<tensor<2xi8>, tensor<3x4xbf16>>",
    ):  # fmt: skip
        assert part in line
    with pytest.raises(RuntimeError, match="target"):
        results[0].cpu()
    assert torch.equal((x + 1).cpu(), torch.full((3,), 2.0))  # the next program runs


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (([], "t", [(1,)], [torch.int8]), "no inputs"),
        ((None, "t", [(1,)], []), "1 shapes and 0 dtypes"),
        ((None, "t", [(1,)], [torch.int8], False, "", 5), "api_version=5"),
    ],
)
def test_impossible_calls(arguments: tuple, match: str) -> None:
    inputs, *rest = arguments
    with pytest.raises(ValueError, match=rf"\[custom_call\] got {match}"):
        stablehlo_custom_call([torch.ones(1, device="xla")] if inputs is None else inputs, *rest)


def test_places_in_memory_keep_values_and_gradients() -> None:
    x = torch.arange(4.0, device="xla", requires_grad=True)
    y = place_to_device(place_to_host(x * 2))
    assert re.search(r'_xla_buffer_placement = "pinned_host"', xm.get_stablehlo([y]))
    (y * y).sum().backward()
    assert y.tolist() == [0, 2, 4, 6] and x.grad.tolist() == [0, 8, 16, 24]


def test_operators_of_a_library_are_exported_as_calls(library: torch.library.Library) -> None:
    library.define("pair(Tensor a, Tensor b) -> (Tensor, Tensor)")
    library.impl("pair", lambda a, b: (torch.empty_like(a), torch.empty_like(b)), "Meta")
    library.define("scaled(Tensor a, float factor) -> Tensor")
    library.impl("scaled", lambda a, factor: torch.empty_like(a), "Meta")

    class Pair(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = torch.ops.custom_calls.pair(a.sin(), b)
            return torch.ops.custom_calls.pair(a, b.cos())

    class Scaled(torch.nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return torch.ops.custom_calls.scaled(a, 2.0)

    options = StableHLOExportOptions(custom_ops_allowed_in_graph={"custom_calls"})
    arguments = (torch.ones(2), torch.ones(3))
    text = exported_program_to_stablehlo(torch.export.export(Pair(), arguments), options).get_stablehlo_text()
    assert text.count("stablehlo.custom_call @custom_calls.pair.default") == 2
    with pytest.raises(NotImplementedError, match=r"\[custom_call\] got custom_calls.scaled.default"):
        exported_program_to_stablehlo(torch.export.export(Scaled(), arguments[:1]), options)
    with pytest.raises(NotImplementedError, match="only run"):
        exported_program_to_stablehlo(torch.export.export(Pair(), arguments))


def test_an_operator_with_a_kernel_for_this_device(library: torch.library.Library) -> None:
    library.define("twice(Tensor a) -> Tensor")
    library.impl("twice", torch.empty_like, "Meta")
    library.impl("twice", lambda a: a + a, "XLA")

    class Twice(torch.nn.Module):
        def forward(self, a: torch.Tensor) -> torch.Tensor:
            return torch.ops.custom_calls.twice(a.neg())

    x = torch.arange(3.0)
    assert Twice()(x.to("xla")).tolist() == [0, -2, -4]
    assert exported_program_to_stablehlo(torch.export.export(Twice(), (x,)))(x).tolist() == [0, -2, -4]


XLA_LIB.define("probe_update(Tensor cache, Tensor rows, Tensor place) -> Tensor")


@requires_jax
def _update(cache: torch.Tensor, rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    return xb.call_jax(_updated, (cache, rows, place))


def _updated(cache, rows, place):
    import jax

    return jax.lax.dynamic_update_slice(cache, rows, (place[0], 0))


torch.library.impl(XLA_LIB, "probe_update", "XLA")(_update)
torch.library.impl(XLA_LIB, "probe_update", "CompositeExplicitAutograd")(lambda cache, *_: torch.empty_like(cache))


@pytest.mark.parametrize("compiled", [False, True])
def test_a_kernel_in_jax_as_an_operator_of_its_own(compiled: bool) -> None:
    """As engines that serve models define theirs."""

    def step(cache: torch.Tensor, rows: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        torch.ops.xla.dynamo_set_buffer_donor_(cache, True)
        cache.copy_(torch.ops.xla.probe_update(cache, rows + 1, place))
        return cache.sum(1)

    cache, rows = torch.zeros(4, 2).to("xla"), torch.ones(2, 2).to("xla")
    run = torch.compile(step, backend="openxla", fullgraph=True) if compiled else step
    assert run(cache, rows, torch.tensor([1]).to("xla")).tolist() == [0, 4, 4, 0]
    assert cache.tolist() == [[0, 0], [2, 2], [2, 2], [0, 0]]


def test_marks_for_torch_compile_are_checked() -> None:
    x = torch.ones(2, 3, device="xla")
    ids = list(range(4))
    with pytest.raises(RuntimeError, match=r"\[spmd\] got a mesh of 4 devices.*call torch_xla.runtime.use_spmd"):
        torch.ops.xla.dynamo_mark_sharding(x, ids, [2, 2], "('a', 'b')", "('a', None)")
    with pytest.raises(AssertionError, match=r"\[mesh\] Number of device IDs \(4\) must match mesh size \(6\)"):
        torch.ops.xla.dynamo_mark_sharding(x, ids, [2, 3], "('a', 'b')", "('a', None)")
    host = torch.ones(2)
    assert torch.ops.xla.dynamo_mark_sharding(host, [], [], "()", "()") is host


def test_a_kernel_of_lapack_is_loaded_before_its_first_call() -> None:
    code = (
        "import torch, torch_xla\n"
        "from torch_xla.experimental.stablehlo_custom_call import stablehlo_custom_call\n"
        "x = torch.eye(3, device='xla') * 4\n"
        "shapes, dtypes, lower = [[3, 3], []], [torch.float32, torch.int32], '{uplo = 76 : ui8}'\n"
        "factor, info = stablehlo_custom_call((x,), 'lapack_spotrf_ffi', shapes, dtypes,"
        " backend_config=lower, api_version=4)\n"
        "assert factor.diag().tolist() == [2, 2, 2] and info.item() == 0\n"
    )
    python("-c", code, imported=True)
