"""The hand-written JAX steps that benchmarks compare with do what the workloads do: their losses agree with torch's."""

from __future__ import annotations

import pytest

from benchmarks import jax_steps, workloads

STEPS = 4


@pytest.mark.slow
@pytest.mark.parametrize("name", list(jax_steps.STEPS))
def test_losses_agree_with_torch(name: str) -> None:
    theirs, ours = workloads.build(name, "cpu"), jax_steps.STEPS[name]()
    expected = [theirs.step().item() for _ in range(STEPS)]
    assert [ours.step().item() for _ in range(STEPS)] == pytest.approx(expected, rel=1e-3)
