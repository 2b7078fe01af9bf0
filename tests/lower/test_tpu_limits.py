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


def test_the_rest_is_refused_with_its_line() -> None:
    x = torch.ones(2, dtype=torch.complex128, device="xla")
    for supported in (x / 3, x.abs(), x + 1, x.exp(), x.real.tanh(), x.to(torch.complex64).tanh()):
        lowered([supported], "graph", "tpu")
    for refused in (torch.tanh(x), x**x, x.rsqrt()):
        with pytest.raises(RuntimeError, match=r"\[tpu\] got .* of complex128(.|\n)*test_tpu_limits.py"):
            lowered([refused], "graph", "tpu")
        lowered([refused], "graph", "cuda")
