"""Four CPU devices, hypothesis profiles, and fixtures that pin how often something happens.

The environment must be set before anything imports torch_xla. A run that sets PJRT_DEVICE itself keeps its choice, so
the same tests run on a GPU.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("PJRT_DEVICE", "CPU")
os.environ.setdefault("CPU_NUM_DEVICES", "4")
os.environ.setdefault("XLA_VERIFY_GRAPHS", "1")
# Tests of single rules start JAX before there is an xla tensor; they must find as many devices.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", os.environ["CPU_NUM_DEVICES"])

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "default", max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("fuzz", settings.get_profile("default"), max_examples=10_000, derandomize=False)
settings.load_profile("default")

torch.manual_seed(0)  # for the numbers that test modules draw when they are collected


@pytest.fixture(autouse=True)
def same_start() -> None:
    """The same random numbers and the same current device in every run of a test, whichever ran before."""
    torch.manual_seed(0)
    if "torch_xla" in sys.modules:  # importing it is part of what some tests look at
        sys.modules["torch_xla"]._bindings.set_current_device(0)


@dataclass
class Count:
    """How often a counter went up inside a block; read it after the block."""

    value: int = 0


Counting = Callable[..., AbstractContextManager[Count]]


@pytest.fixture
def counted() -> Counting:
    """`with counted("CachedCompile", 3):` fails unless the counter rises by 3; without a number it only counts."""
    import torch_xla.debug.metrics as met

    @contextmanager
    def counting(name: str, expected: int | None = None) -> Iterator[Count]:
        count = Count()
        before = met.counter_value(name) or 0
        yield count
        count.value = (met.counter_value(name) or 0) - before
        if expected is not None:
            assert count.value == expected, f"{name} rose by {count.value}, expected {expected}"

    return counting


@pytest.fixture
def compiles(counted: Counting) -> Counting:
    """`with compiles(1):` fails unless exactly one graph is compiled in the block; without a number it only counts."""

    @contextmanager
    def counting(expected: int | None = None) -> Iterator[Count]:
        with counted("UncachedCompile", expected) as count:
            yield count

    return counting
