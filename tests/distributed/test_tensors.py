"""DTensors and functional collectives on device ``xla``; what the processes run is in tensor_bodies.py."""

from __future__ import annotations

import pytest
import tensor_bodies

from torch_xla._core.job import launcher

pytestmark = pytest.mark.costs("processes of a job, which start and compile each for itself")


def test_distributed_tensors() -> None:
    launcher.run(tensor_bodies.distributed_tensors, (), 2)


def test_attention_and_recurrent_layers_of_distributed_tensors() -> None:
    launcher.run(tensor_bodies.attention, (), 2)


def test_functional_collectives_and_those_that_dynamo_traces() -> None:
    launcher.run(tensor_bodies.functional, (), 2)
