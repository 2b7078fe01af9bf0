"""Where buffers are and what programs span: on one device, as long as nothing says otherwise."""

from __future__ import annotations

import jax
import pytest
import torch

from torch_xla import _bindings
from torch_xla._core.device import client, placement
from torch_xla._core.execute import barrier


def key_of(tensor: torch.Tensor) -> str:
    return _bindings.Cut.of_tensors([tensor]).preview().key


@pytest.mark.parametrize("index", range(2))
def test_one_device(index: int) -> None:
    result = placement.of(index)
    assert result.devices == result.local == (client.jax_device(index),)
    assert result.sharding == jax.sharding.SingleDeviceSharding(client.jax_device(index))
    assert result.platform == client.jax_device(index).platform


@pytest.mark.parametrize("index", range(2))
def test_buffers_are_there(index: int) -> None:
    x = torch.arange(3.0).to(f"xla:{index}")
    for tensor in (x, x + 1, torch.ones(3, device=x.device)):
        (buffer,) = barrier.buffers([tensor])
        assert buffer.sharding == placement.of(index).sharding
        assert placement.index_of(buffer) == index


def test_no_such_device() -> None:
    with pytest.raises(RuntimeError, match=r"\[device\] got xla:99"):
        placement.of(99)


def test_keys_know_the_placement_of_leaves() -> None:
    (buffer,) = barrier.buffers([torch.arange(3.0).to("xla:0")])
    own, same, other = (_bindings.tensor_of(buffer, [3], torch.float32, 0, number) for number in (0, 0, 1))
    assert key_of(own + own) == key_of(same + same)
    assert key_of(own + own) != key_of(other + other)


def test_a_copy_has_the_placement_of_its_original() -> None:
    (buffer,) = barrier.buffers([torch.arange(3.0).to("xla:0")])
    own, other = (_bindings.tensor_of(buffer, [3], torch.float32, 0, number) for number in (0, 1))
    assert key_of(other.clone().sin()) != key_of(own.clone().sin())
