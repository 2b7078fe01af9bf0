"""What XLA for TPUs ends the process on: written otherwise, or refused at the user's line."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import torch_xla  # noqa: F401
from torch_xla._core.execute.export import lowered
from torch_xla._core.lower import tpu_limits

VALUES = np.array([3 + 4j, -1e200 + 1e199j, 0, 1e-200j, -2.5, 7e-300 - 1j, complex(np.inf, 1)])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.astype(jnp.complex64),
        lambda x: x.astype(jnp.complex64).astype(jnp.complex128),
        lambda x: jax.lax.real(x).astype(jnp.complex128),
        lambda x: jnp.arange(7).astype(jnp.complex128) + x,
        lambda x: (x[:, None] / VALUES[:2])[:-1],
        jnp.abs,
    ],
)
def test_parts_have_the_same_values(function) -> None:
    with jax.enable_x64(True), np.errstate(over="ignore"):
        expected = function(jnp.asarray(VALUES))
        stage = jax.jit(function).lower(jnp.asarray(VALUES))
        module = stage.compiler_ir("stablehlo")
        tpu_limits.by_parts(module)
        got = stage.compile()(jnp.asarray(VALUES))
    wide = [line for line in str(module).split("\n") if "complex<f64>" in line]
    assert wide and not any(f"stablehlo.{name} " in line for line in wide for name in ("convert", "divide", "abs"))
    np.testing.assert_allclose(got, expected, rtol=1e-14)


def test_bits_of_a_double_are_computed() -> None:
    rng = np.random.default_rng(0)
    values = np.ldexp(rng.uniform(-1, 1, 4000), rng.integers(-90, 127, 4000))
    edges = np.concatenate([np.nextafter(2.0 ** np.arange(-60, 60), side) for side in (0, np.inf)])
    special = np.array([0.0, -0.0, np.inf, -np.inf, 1.0, -1.0, 2.0**127, 1 - 2.0**-30, 3e38])
    values = np.concatenate([values, edges, -edges, special])
    high = values.astype(np.float32)
    with np.errstate(invalid="ignore"):  # pairs of float32 have 48 bits
        values = np.where(np.isinf(values), values, high.astype(np.float64) + (values - high).astype(np.float32))
    with jax.enable_x64(True):
        for kind in (np.int64, np.uint64, np.uint32):
            stage = jax.jit(lambda x, kind=kind: jax.lax.bitcast_convert_type(x, kind)).lower(values)
            tpu_limits.by_parts(stage.compiler_ir("stablehlo"))
            assert "subtract" in stage.as_text()
            np.testing.assert_array_equal(stage.compile()(values), values[:, None].view(kind).squeeze())
        text = lowered(
            [torch.signbit(torch.ones(2, dtype=torch.float64, device="xla"))], "graph", "tpu"
        ).stage.as_text()
    assert "f64>) -> tensor<2xi64>" not in text


def test_the_rest_is_refused_with_its_line() -> None:
    x = torch.ones(2, dtype=torch.complex128, device="xla")
    for supported in (x / 3, x.abs(), x + 1, x.exp(), x.real.tanh(), x.to(torch.complex64).tanh()):
        lowered([supported], "graph", "tpu")
    for refused in (torch.tanh(x), x**x, x.rsqrt()):
        with pytest.raises(RuntimeError, match=r"\[tpu\] got .* of complex128(.|\n)*test_tpu_limits.py"):
            lowered([refused], "graph", "tpu")
        lowered([refused], "graph", "cuda")
