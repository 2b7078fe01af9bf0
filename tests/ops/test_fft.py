"""Fourier transforms."""

from __future__ import annotations

import jax
import pytest
import torch
from harness import check, values

from opdb import tolerances
from torch_xla._core.execute import export

A = torch.ops.aten

test_values = values(
    [
        (A._fft_c2c.default, torch.randn(3, 5, 4, dtype=torch.complex64), [1, 2], 0, True),
        (A._fft_c2c.default, torch.randn(3, 5, dtype=torch.complex64), [0], 2, False),
        (A._fft_r2c.default, torch.randn(3, 5, 6), [0, 2], 1, True),
        (A._fft_r2c.default, torch.randn(3, 5), [1], 0, False),
        (A._fft_c2r.default, torch.randn(3, 4, dtype=torch.complex64), [1], 2, 7),
        (A._fft_c2r.default, torch.randn(3, 4, dtype=torch.complex64), [0, 1], 1, 6),
    ]
)


@pytest.mark.parametrize("n", [1, 2, 7, 12, 35, 64])
def test_doubles_on_tpus_are_those_of_cpus(n, monkeypatch):
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *arrays, tpu, **others: tpu(*arrays))
    for dtype in (torch.float64, torch.complex128):
        monkeypatch.setitem(tolerances.DTYPE, dtype, (1e-11, 1e-11))
    x, z = torch.randn(3, n, 2, dtype=torch.float64), torch.randn(3, n, 2, dtype=torch.complex128)
    for forward in (True, False):
        check(A._fft_c2c.default, z, [0, 1], 1, forward)
    for onesided in (True, False):
        check(A._fft_r2c.default, x, [0, 1], 2, onesided)
    check(A._fft_c2r.default, torch.fft.rfftn(x, dim=[0, 1]), [0, 1], 2, n)


def test_tpus_get_no_transforms_of_doubles():
    x = torch.ones(6, dtype=torch.float64, device="xla")
    both = [torch.fft.fft(x), torch.fft.irfft(torch.fft.rfft(x))]
    assert "stablehlo.fft" not in export.lowered(both, "graph", "tpu").stage.as_text()
    assert "stablehlo.fft" in export.lowered(both, "graph", "cuda").stage.as_text()
