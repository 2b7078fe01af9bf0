"""What the tests of the pipeline look at: cut graphs, and how often something was timed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from torch_xla import _bindings, _metrics
from torch_xla._core import cache, graph


def cut_of(*tensors: torch.Tensor) -> graph.Graph:
    """The graph of pending tensors, which stay pending."""
    return graph.describe(_bindings.Graph.of_tensors(list(tensors), live=False))


@dataclass
class Samples:
    """How often a metric was sampled inside a block; read it after the block."""

    value: int = 0


def _count(name: str) -> int:
    metric = _metrics.metric(name)
    return metric.count if metric is not None else 0


@contextmanager
def sampled(name: str, expected: int | None = None) -> Iterator[Samples]:
    """`with sampled("TransferToDeviceTime", 1):` fails unless the metric gets that many samples in the block."""
    samples = Samples()
    before = _count(name)
    yield samples
    samples.value = _count(name) - before
    if expected is not None:
        assert samples.value == expected, f"{name} was sampled {samples.value} times, expected {expected}"


def spy_on_barriers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that gets the key of every graph from now on, whether known or new."""
    keys: list[str] = []
    find = cache.find

    def spy(key: str, device: int) -> object:
        keys.append(key)
        return find(key, device)

    monkeypatch.setattr(cache, "find", spy)
    return keys
