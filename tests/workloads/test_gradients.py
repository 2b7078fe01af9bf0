"""Gradients after one backward of the workloads agree with the CPU's, tensor by tensor."""

from __future__ import annotations

import pytest
import torch

import torch_xla
from benchmarks import workloads

RTOL, ATOL = 1e-3, 1e-5


def gradients(name: str, device: torch.device | str) -> dict[str, torch.Tensor]:
    """The gradients that one step leaves, by parameter."""
    workload = workloads.build(name, device)
    workload.step()
    torch_xla.sync()
    assert all(p.grad is not None for p in workload.model.parameters())
    return {key: p.grad.cpu() for key, p in workload.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["mlp", "digits", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_gradients_of_the_first_step(name: str) -> None:
    ours, theirs = gradients(name, torch_xla.device()), gradients(name, "cpu")
    assert ours.keys() == theirs.keys()
    for key, expected in theirs.items():
        scale = float(expected.abs().max())
        assert ours[key].shape == expected.shape
        assert ours[key].dtype == expected.dtype
        torch.testing.assert_close(
            ours[key], expected, rtol=RTOL, atol=ATOL * scale, msg=lambda text, key=key: f"{name}.{key}: {text}"
        )
