"""Each workload's losses on device xla agree with the CPU's, in every way of running it, with one compile per loop.

So do gradients, tensor by tensor, and the losses of the hand-written JAX steps that benchmarks compare with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import pytest
import rotation
import torch

import torch_xla
from benchmarks import jax_steps, workloads
from torch_xla.experimental import eager_mode

STEPS = 6  # new graphs come in the first three
WORKLOADS = list(workloads.WORKLOADS)


@cache
def cpu_losses(name: str) -> list[float]:
    workload = workloads.build(name, "cpu")
    return [workload.step().item() for _ in range(STEPS)]


@pytest.fixture
def eagerly() -> Iterator[None]:
    eager_mode(True)
    yield
    eager_mode(False)


def losses_on(name: str, device: torch.device | str) -> list[torch.Tensor]:
    """Losses of the steps, left on the device, with a barrier after each."""
    workload = workloads.build(name, device)
    torch_xla.sync()
    losses = []
    for _ in range(STEPS):
        losses.append(workload.step())
        torch_xla.sync()
    return losses


def assert_agree(name: str, losses: list[torch.Tensor], device: str) -> None:
    assert all(loss.device == torch.device(device) for loss in losses)
    expected = torch.tensor(cpu_losses(name))
    torch.testing.assert_close(torch.stack(losses).cpu(), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", WORKLOADS)
def test_with_a_barrier_per_step(name: str) -> None:
    assert_agree(name, losses_on(name, torch_xla.device()), "xla:0")


def in_turns(way: str, of: list[str]) -> list[Any]:
    """The way for each workload: in `make test` for one, the commits' turns."""
    own = rotation.pick(way, of)
    return [pytest.param(name, marks=[] if name == own else [pytest.mark.sweep]) for name in of]


@pytest.mark.slow
@pytest.mark.parametrize("name", in_turns("eagerly", WORKLOADS))
def test_in_eager_mode(name: str, eagerly: None) -> None:
    assert_agree(name, losses_on(name, torch_xla.device()), "xla:0")


@pytest.mark.slow
@pytest.mark.parametrize("name", in_turns("on a second device", WORKLOADS))
def test_on_a_second_device(name: str) -> None:
    assert_agree(name, losses_on(name, torch_xla.device(1)), "xla:1")


@pytest.mark.slow
@pytest.mark.compiled(
    "GPT-2 checks its mask and the sampler its time steps by reading, which compiles nothing in use", reads=False
)
@pytest.mark.parametrize("name", in_turns("in a loop", ["mlp", "resnet", "gpt2", "unet", "llama"]))
def test_a_loop_compiles_once(name: str, compiles: Callable[..., AbstractContextManager]) -> None:
    workload = workloads.build(name, torch_xla.device())
    # Whatever moving the model needs is not the loop's; a stored graph of another test must not hide a second one.
    torch_xla.sync()
    torch_xla._core.compile.cache.clear()
    with compiles(1):
        for _ in range(STEPS):
            loss = workload.step()
            torch_xla.sync()
    assert loss.isfinite()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(jax_steps.STEPS))
def test_hand_written_jax(name: str) -> None:
    hand = jax_steps.STEPS[name]()
    assert [hand.step().item() for _ in range(STEPS)] == pytest.approx(cpu_losses(name), rel=1e-3)


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
            ours[key], expected, rtol=1e-3, atol=1e-5 * scale, msg=lambda text, key=key: f"{name}.{key}: {text}"
        )
