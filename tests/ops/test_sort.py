"""Sorting, selection by rank, and search."""

from __future__ import annotations

import math

import pytest
import torch
from harness import check, lower

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


def describe(x):
    return f"{str(x.dtype)[6:]}{list(x.shape)}"


@pytest.mark.parametrize("x", OPERANDS, ids=describe)
@pytest.mark.parametrize("descending", [False, True])
def test_sort(x, descending):
    check(A.sort.stable, x, stable=True, dim=0, descending=descending)
    check(A.sort.stable, x, stable=True, dim=-1, descending=descending)


def test_sort_default():
    check(A.sort.default, FLOAT, 1, True)


@pytest.mark.parametrize("x", [FLOAT, FLOAT.bfloat16(), FLOAT.long(), FLOAT.double(), WITH_NAN], ids=describe)
@pytest.mark.parametrize("largest", [False, True])
def test_topk(x, largest):
    check(A.topk.default, x, 2, -1, largest)
    check(A.topk.default, x, 1, 0, largest)


def test_topk_of_all_and_nothing():
    check(A.topk.default, FLOAT, 0, 0)
    check(A.topk.default, FLOAT, 6, 1)


def test_topk_of_number():
    check(A.topk.default, torch.tensor(3.0), 1)


@pytest.mark.parametrize("x", [FLOAT, FLOAT.long(), WITH_NAN, torch.tensor(2.0)], ids=describe)
@pytest.mark.parametrize("keepdim", [False, True])
def test_ranks(x, keepdim):
    check(A.kthvalue.default, x, min(2, x.numel()), -1, keepdim)
    check(A.median.dim, x, -1, keepdim)
    check(A.nanmedian.dim, x, -1, keepdim)


@pytest.mark.parametrize("x", [FLOAT, WITH_NAN, INTEGERS, torch.zeros(0), torch.tensor([math.nan] * 3)], ids=describe)
def test_median_of_all(x):
    check(A.median.default, x)
    check(A.nanmedian.default, x)


@pytest.mark.parametrize("x", [INTEGERS, INTEGERS.float(), torch.tensor(3), torch.tensor([[1, 1, 2, 2, 0]])])
@pytest.mark.parametrize("dim", [0, -1])
def test_mode(x, dim):
    check(A.mode.default, x, dim)
    check(A.mode.default, x, dim, True)


@pytest.mark.parametrize("right", [False, True])
def test_search(right):
    options = {"right": right, "out_int32": right}
    edges = torch.tensor([0.0, 1.0, 1.0, 4.0])
    values = torch.tensor([[-1.0, 0.0], [1.0, 9.0]])
    check(A.bucketize.Tensor, values, edges, **options)
    check(A.bucketize.Scalar, 1.0, edges, **options)
    check(A.searchsorted.Tensor, edges, values, **options)
    check(A.searchsorted.Scalar, edges, 2, **options)
    check(A.searchsorted.Tensor, torch.stack([edges, edges + 1]), values, **options)
    check(A.searchsorted.Tensor, torch.zeros(0), values, **options)


def test_search_by_sorter():
    x = torch.tensor([3.0, 1.0, 2.0])
    check(A.searchsorted.Tensor, x, torch.tensor([1.5, 2.0]), side="right", sorter=x.argsort())


@pytest.mark.parametrize("invert", [False, True])
def test_isin(invert):
    check(A.isin.Tensor_Tensor, INTEGERS, torch.tensor([1, 3]), invert=invert)
    check(A.isin.Tensor_Scalar, INTEGERS, 2, invert=invert)
    check(A.isin.Scalar_Tensor, 2, INTEGERS, invert=invert)


@pytest.mark.parametrize("low, high", [(0, 0), (-5, 5), (2, 2)])
def test_histc(low, high):
    check(A.histc.default, FLOAT, 7, low, high)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8])
@pytest.mark.parametrize(("low", "high"), [(0, 6), (2, 5), (0, 0)])
def test_histc_counts_integers_as_other_devices_do(low, high, dtype):
    values = torch.tensor([0, 1, 1, 5, 3, 6, 2], dtype=dtype)
    found = torch.histc(values.to("xla"), bins=7, min=low, max=high)
    assert found.dtype == dtype
    assert found.tolist() == torch.histc(values.float(), bins=7, min=low, max=high).tolist()


def test_topk_places_point_at_the_values():
    x = torch.randn(5, 50)
    values, places = lower(A.topk.default, x, 7)
    assert torch.equal(x.gather(1, places), values)
