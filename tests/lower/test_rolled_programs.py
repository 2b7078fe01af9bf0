"""Random programs whose layers are loops: values are the CPU's, whatever was done to the weights between steps."""

from __future__ import annotations

import os

import pytest
import rolled_programs
import torch

import torch_xla

SEEDS = int(os.environ.get("ROLLED_PROGRAMS", "0"))  # further ones


@pytest.mark.costs("many random programs")
def test_values_are_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_xla.sync()
    monkeypatch.setenv("XLA_ROLL_LAYERS", "2")
    for seed in range(2 + SEEDS):
        result, expected = (rolled_programs.run(device, seed, 2 + 2 * bool(SEEDS)) for device in ("xla", "cpu"))
        assert len(result) == len(expected)
        for one, other in zip(result, expected, strict=True):
            torch.testing.assert_close(
                one, other, rtol=1e-7, atol=1e-9, equal_nan=True, msg=lambda text, seed=seed: f"seed {seed}: {text}"
            )
