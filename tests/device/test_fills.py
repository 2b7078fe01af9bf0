"""Buffers that hold one number."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import torch_xla
from torch_xla._core.device import arrays, transfer


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (300, 7)])
@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        (torch.float32, 0.0),
        (torch.float32, -0.0),
        (torch.float32, 1.5),
        (torch.bfloat16, 0),
        (torch.float8_e5m2, 0.0),
        (torch.int64, 0),
        (torch.int64, -3),
        (torch.bool, False),
        (torch.complex64, 0j),
        (torch.complex64, complex(0.0, -0.0)),
    ],
)
def test_a_fill_has_the_bits_of_the_number(dtype: torch.dtype, number: complex, shape: tuple[int, ...]) -> None:
    torch_xla.device()
    value = transfer.download((transfer.fill(shape, dtype, number, 0), -1), shape, dtype)
    expected = torch.full(shape, number, dtype=dtype)
    assert value.shape == expected.shape and value.dtype == dtype
    assert torch.equal(*(t.flatten().view(torch.uint8) for t in (value, expected)))


def test_a_large_fill_of_zeros_takes_its_memory_when_it_is_written() -> None:
    """The client takes it as it is: as much as the model has parameters, twice."""
    before = _resident()
    filled = arrays.filled((1 << 28,), torch.float32, 0.0)
    assert filled.ctypes.data % 64 == 0
    assert _resident() - before < 1 << 28
    assert not np.any(filled[:: 1 << 20])


def _resident() -> int:
    with open("/proc/self/smaps_rollup") as file:
        private = next(line for line in file if line.startswith("Rss:"))
    return int(private.split()[1]) << 10


def test_their_order_is_that_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[int] = []
    fill = transfer.fill

    def noted(shape: tuple[int, ...], dtype: torch.dtype, number: float, *rest: Any, **options: Any) -> Any:
        order.append(int(number))
        return fill(shape, dtype, number, *rest, **options)

    monkeypatch.setattr(transfer, "fill", noted)
    for history in (0, 3, 7):  # what processes of a job may differ in: where memory of other nodes was
        junk = [torch.ones(2, device="xla") * i for i in range(history)]
        while junk:
            junk.pop(0)
        order.clear()
        kept = [torch.full((4,), float(i), device="xla") for i in range(12)]
        torch_xla.sync()
        assert order == list(range(12))
        del kept
