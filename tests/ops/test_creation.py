"""Tensors made from numbers alone."""

from __future__ import annotations

import pytest
import torch
from harness import lower, values

import torch_xla

A = torch.ops.aten
X = torch.randn(2, 3)
N = torch.arange(3)

test_values = values(
    [
        (A.zeros.default, [2, 3]),
        (A.zeros.default, [0], {"dtype": torch.int64}),
        (A.ones.default, [2], {"dtype": torch.bool}),
        (A.full.default, [2, 2], 3.5),
        (A.full.default, [], 7),
        (A.full.default, [2], True),
        (A.zeros_like.default, N),
        (A.ones_like.default, X, {"dtype": torch.bfloat16}),
        (A.full_like.default, N, 2.7),
        (A.new_zeros.default, X, [4]),
        (A.new_ones.default, N, [2, 2]),
        (A.new_full.default, N, [2], 9),
        (A.scalar_tensor.default, 2.5, {"dtype": torch.float64}),
        (A.arange.default, 5),
        (A.arange.default, 5.5),
        (A.arange.start, 2, 7, {"dtype": torch.float32}),
        (A.arange.start_step, 10, 0, -3),
        (A.arange.start_step, 0.0, 1.0, 0.1),
        (A.arange.start_step, 0, 8, 2, {"dtype": torch.bfloat16}),
        (A.linspace.default, 0, 1, 7),
        (A.linspace.default, 3.5, -2, 1),
        (A.linspace.default, 0, 10, 4, {"dtype": torch.int64}),
        (A.linspace.default, 0, 1, 0),
        (A.linspace.Tensor_Tensor, torch.tensor(1.0), torch.tensor(4.0), 5),
        (A.logspace.default, 0, 2, 5),
        (A.logspace.default, 0, 3, 4, 2.0),
        (A.eye.default, 3),
        (A.eye.m, 2, 4, {"dtype": torch.int32}),
        (A.tril_indices.default, 3, 4, 1),
        (A.triu_indices.default, 4, 3, -1),
    ]
)


@pytest.mark.parametrize(
    "case",
    [
        (A.empty.memory_format, [2, 3]),
        (A.empty_like.default, X),
        (A.new_empty.default, X, [5]),
        (A.empty_strided.default, [2, 3], [1, 2]),
        (A.new_empty_strided.default, X, [2, 3], [1, 2]),
    ],
    ids=lambda c: str(c[0]),
)
def test_empty_tensors_have_the_promised_shape(case):
    op, *args = case
    (got,) = lower(op, *args)
    assert got is not None and got.shape == op(*args).shape


RANGES = {
    "arange": lambda n, out: torch.arange(0, n, out=out),
    "steps": lambda n, out: torch.arange(1, 1 + 2 * n, 2, out=out),
    "range": lambda n, out: torch.ops.aten.range.out(0, n - 1, out=out),
    "linspace": lambda n, out: torch.linspace(0, n - 1, n, out=out),
    "logspace": lambda n, out: torch.logspace(0, n - 1, n, base=2, out=out),
}
OUTS = {
    "part": lambda x: x.narrow(1, 1, 2),
    "transposed": lambda x: x.t(),
    "whole": lambda x: x,
    "row": lambda x: x[1],
    "column": lambda x: x[:, 1],
    "integers": lambda x: x.int(),
    "nothing": lambda x: x.new_empty(0),
}


@pytest.mark.parametrize("make", RANGES.values(), ids=list(RANGES))
def test_ranges_fill_a_tensor_that_is_there_in_its_own_shape(make):
    def program(device):
        made = []
        for place in OUTS.values():
            x = torch.zeros(2, 3).to(device)
            out = place(x)
            assert make(out.numel() or 4, out) is out
            made += [x, out]
        return made

    for got, expected in zip(program("xla"), program("cpu"), strict=True):
        assert got.shape == expected.shape and got.stride() == expected.stride()
        assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("make", RANGES.values(), ids=list(RANGES))
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized", "ignore:The number of elements")
def test_ranges_of_another_length_resize(make):
    expected, got = torch.zeros(2, 3), torch.zeros(2, 3).to("xla")
    make(8, expected), make(8, got)
    assert got.shape == (8,) and torch.equal(got.cpu(), expected)


DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.int8, torch.int64, torch.uint64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("fill", [True, False])
def test_memory_that_nobody_has_written(dtype: torch.dtype, fill: bool) -> None:
    """It is filled under deterministic algorithms, as PyTorch documents it, and holds zeros else."""

    def made(device: str) -> list[torch.Tensor]:
        zero = torch.zeros(2, 3, dtype=dtype, device=device)
        grown = zero.clone().resize_(3, 3)
        larger = torch.empty(0, dtype=dtype, device=device).resize_(4)
        return [
            torch.empty(3, dtype=dtype, device=device),
            torch.empty(4, dtype=dtype, device=device, out=zero.new_zeros(1)),
            torch.empty_strided((2, 3), (1, 4), dtype=dtype, device=device),
            torch.empty_permuted((2, 3), (1, 0), dtype=dtype, device=device),
            torch.empty_like(zero),
            zero.new_empty(2),
            grown,
            larger,
        ]

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    try:
        result = made("xla")
        torch_xla.sync()
        expected = made("cpu") if fill else [torch.zeros(t.shape, dtype=dtype) for t in result]
        for value, want in zip(result, expected, strict=True):
            torch.testing.assert_close(value.cpu(), want, rtol=0, atol=0, equal_nan=True)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = True
