"""Random programs whose new graphs run operator by operator: values are the CPU's, draws those of programs."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import hot_programs
import pytest
import torch
from probes import setting
from torch import Tensor

import torch_xla
from torch_xla import _config
from torch_xla._core.compile import cache
from torch_xla._core.execute import hotness

pytestmark = [pytest.mark.by_default("new graphs are not compiled"), pytest.mark.usefixtures("when_hot")]

SEEDS = int(os.environ.get("HOT_PROGRAMS", "0"))  # further ones


def anew(seed: int, **how: int) -> list[Tensor]:
    """A program's values, as in a process that has run nothing before."""
    torch_xla.sync()
    hotness.clear()
    cache.clear()
    return hot_programs.run("xla", seed, **how)


def compare(ours: list[Tensor], cpus: list[Tensor], seed: int) -> None:
    assert len(ours) == len(cpus)
    for actual, expected in zip(ours, cpus, strict=True):
        close = 0.02 if actual.dtype == torch.bfloat16 else 1e-4 if actual.is_floating_point() else 0.0
        torch.testing.assert_close(
            actual, expected, rtol=close, atol=close, equal_nan=True, msg=lambda text: f"seed {seed}: {text}"
        )


def test_values_are_the_cpus() -> None:
    for seed in range(80 + SEEDS):
        compare(anew(seed, turns=1), hot_programs.run("cpu", seed, turns=1), seed)


def test_graphs_that_repeat_go_on_as_programs() -> None:
    for seed in range(2 + SEEDS // 100):
        compare(anew(seed, turns=4), hot_programs.run("cpu", seed, turns=4), seed)


def test_draws_are_the_same_in_each_run() -> None:
    for seed in range(15 + SEEDS):
        for one, other in zip(*(anew(seed, turns=1, drawing=True) for _ in range(2)), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True, msg=f"seed {seed}")


def test_draws_are_those_of_programs() -> None:
    for seed in range(2 + SEEDS // 100):
        result = anew(seed, turns=1, drawing=True)
        with setting(_config.XLA_HOST_COMPUTE, "never"):
            compare(result, anew(seed, turns=1, drawing=True), seed)


def test_in_threads() -> None:
    def work(first: int) -> None:
        for seed in range(first, first + 20 + SEEDS // 3):
            compare(hot_programs.run("xla", seed, turns=1), hot_programs.run("cpu", seed, turns=1), seed)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, (10_000, 20_000, 30_000)))  # which raises what failed
