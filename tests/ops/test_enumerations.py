"""Types and memory formats as arguments: enumerations in Python, whole numbers in the recorder."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from agreement import closely, exactly, on_both
from torch import Tensor

import torch_xla
from torch_xla import _bindings
from torch_xla._core.graph import graph
from torch_xla.ops import registry

BYTES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16]
BYTES += [torch.float32, torch.float64, torch.complex64, torch.bool]


@pytest.mark.parametrize("source", BYTES, ids=str)
def test_bytes_read_as_another_type(source: torch.dtype) -> None:
    x = torch.tensor([[1, 0, 3, 2, 5, 4, 7, 6], [2, 1, 3, 4, 0, 1, 1, 2]]).to(source)
    pairs = []
    for target in BYTES:
        if torch.bool in (source, target) and x.element_size() != torch.empty(0, dtype=target).element_size():
            continue
        if target == torch.bool:  # other bytes than 0 and 1 are not defined
            pairs.append(((x != 0).to(source).to("xla").view(target), (x != 0).to(source).view(target)))
        else:
            pairs.append((x.to("xla").view(target), x.view(target)))
    torch_xla.sync()
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)


@on_both(exactly, compiled=True)
def test_bytes_written_through_another_type(device: str) -> Tensor:
    x = torch.arange(1.0, 5.0).to(device)
    x.view(torch.int32)[1:3] += 1 << 23  # doubles them
    return x


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.nansum(dtype=torch.float64),
        lambda x: x.sum(0, dtype=torch.float64),
        lambda x: x.prod(dtype=torch.float64),
        lambda x: x.mean(dtype=torch.float64),
        lambda x: x.cumsum(0, dtype=torch.float64),
        lambda x: F.softmax(x, 0, dtype=torch.float64),
        lambda x: F.log_softmax(x, 0, dtype=torch.float64),
        lambda x: torch.linalg.vector_norm(x, dtype=torch.float64),
        lambda x: torch.linalg.matrix_norm(x, dtype=torch.float64),
        lambda x: torch.full_like(x, 3, dtype=torch.int8),
        lambda x: torch.arange(3, dtype=torch.int16, device=x.device),
        lambda x: torch.eye(3, dtype=torch.float64, device=x.device),
        lambda x: torch.bucketize(x, torch.arange(3.0, device=x.device), out_int32=True),
        lambda x: torch.hann_window(4, dtype=torch.float64, device=x.device),
        lambda x: torch.logspace(0, 1, 3, dtype=torch.float64, device=x.device),
        lambda x: x.new_zeros(2, dtype=torch.complex64),
        lambda x: x.to(torch.float16, memory_format=torch.channels_last) if x.dim() == 4 else x.to(torch.float16),
        lambda x: x.view(1, 2, 1, 2).clone(memory_format=torch.channels_last),
        lambda x: x.view(1, 2, 1, 2).contiguous(memory_format=torch.channels_last),
    ],
)
@on_both(closely, compiled=True)
def test_a_type_or_format_in_a_compiled_graph(device: str, function: Callable[[Tensor], Tensor]) -> Tensor:
    return function(torch.tensor([[1.0, 2.0], [3.0, 4.0]]).to(device))


def test_rules_and_decompositions_get_what_the_schema_says(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def rule(ctx: registry.Context, x: object, kind: object, order: object, layout: object, number: object) -> object:
        seen.extend((kind, order, layout, number))
        return x

    monkeypatch.setitem(registry._RULES, "enumerations.same.default", rule)
    with torch.library._scoped_library("enumerations", "DEF") as library:
        library.define("same(Tensor x, ScalarType kind, MemoryFormat? order, Layout layout, int number) -> Tensor")
        library.impl("same", lambda x, *rest: torch.empty_like(x), "Meta")
        op = torch.ops.enumerations.same
        x = op(torch.ones(2, device="xla"), torch.int16, torch.channels_last, torch.strided, 3)
        described = graph.describe(_bindings.Cut.of_tensors([x]).preview())
        torch_xla.sync()
    expected = [torch.int16, torch.channels_last, torch.strided, 3]
    assert list(described.nodes[-1].args[1:]) == seen == expected
