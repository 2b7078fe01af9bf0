"""Sorting, selection by rank, and search."""

from __future__ import annotations

import math

import pytest
import torch
from harness import lower, values

A = torch.ops.aten
torch.manual_seed(0)
FLOAT = torch.randperm(24).reshape(4, 6).float() - 10
WITH_NAN = torch.tensor([[1.0, math.nan, -math.inf, 3.0, -2.0], [math.inf, 0.5, 2.0, -1.0, math.nan]])
INTEGERS = torch.randint(0, 4, (4, 6))
OPERANDS = [
    FLOAT,
    FLOAT.bfloat16(),
    FLOAT.double(),
    WITH_NAN,
    INTEGERS,
    INTEGERS > 1,
    torch.zeros(0, 3),
    torch.tensor(2),
]


@values
def test_order():
    for x in OPERANDS:
        for descending in (False, True):
            for dim in (0, -1):
                yield A.sort.stable, x, {"stable": True, "dim": dim, "descending": descending}
    yield A.sort.default, FLOAT, 1, True
    for x in (FLOAT, FLOAT.bfloat16(), FLOAT.long(), FLOAT.double(), WITH_NAN):
        for largest in (False, True):
            yield A.topk.default, x, 2, -1, largest
            yield A.topk.default, x, 1, 0, largest
    yield A.topk.default, FLOAT, 0, 0
    yield A.topk.default, FLOAT, 6, 1
    yield A.topk.default, torch.tensor(3.0), 1


@values
def test_ranks():
    for x in (FLOAT, FLOAT.long(), WITH_NAN, torch.tensor(2.0)):
        for keepdim in (False, True):
            yield A.kthvalue.default, x, min(2, x.numel()), -1, keepdim
            yield A.median.dim, x, -1, keepdim
            yield A.nanmedian.dim, x, -1, keepdim
    for x in (FLOAT, WITH_NAN, INTEGERS, torch.zeros(0), torch.tensor([math.nan] * 3)):
        yield A.median.default, x
        yield A.nanmedian.default, x
    for x in (INTEGERS, INTEGERS.float(), torch.tensor(3), torch.tensor([[1, 1, 2, 2, 0]])):
        for dim in (0, -1):
            yield A.mode.default, x, dim
            yield A.mode.default, x, dim, True


@values
def test_search():
    edges = torch.tensor([0.0, 1.0, 1.0, 4.0])
    values = torch.tensor([[-1.0, 0.0], [1.0, 9.0]])
    for right in (False, True):
        options = {"right": right, "out_int32": right}
        yield A.bucketize.Tensor, values, edges, options
        yield A.bucketize.Scalar, 1.0, edges, options
        yield A.searchsorted.Scalar, edges, 2, options
        for among in (edges, torch.stack([edges, edges + 1]), torch.zeros(0)):
            yield A.searchsorted.Tensor, among, values, options
    x = torch.tensor([3.0, 1.0, 2.0])
    yield A.searchsorted.Tensor, x, torch.tensor([1.5, 2.0]), {"side": "right", "sorter": x.argsort()}
    for invert in (False, True):
        yield A.isin.Tensor_Tensor, INTEGERS, torch.tensor([1, 3]), {"invert": invert}
        yield A.isin.Tensor_Scalar, INTEGERS, 2, {"invert": invert}
        yield A.isin.Scalar_Tensor, 2, INTEGERS, {"invert": invert}
    for low, high in ((0, 0), (-5, 5), (2, 2)):
        yield A.histc.default, FLOAT, 7, low, high


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize(("low", "high"), [(0, 6), (2, 5), (0, 0)])
def test_histc_counts_integers_as_other_devices_do(low, high, dtype):
    values = torch.tensor([0, 1, 1, 5, 3, 6, 2], dtype=dtype)
    result = torch.histc(values.to("xla"), bins=7, min=low, max=high)
    assert result.dtype == dtype
    assert result.tolist() == torch.histc(values.float(), bins=7, min=low, max=high).tolist()


def test_topk_places_point_at_the_values():
    x = torch.randn(5, 50)
    values, places = lower(A.topk.default, x, 7)
    assert torch.equal(x.gather(1, places), values)


def test_a_number_in_a_tensor():
    x = torch.tensor([1, 2])
    for number in (1, 3, 2.5):
        result = torch.isin(number, x.to("xla"))
        torch.testing.assert_close(result.cpu(), torch.isin(number, x))
