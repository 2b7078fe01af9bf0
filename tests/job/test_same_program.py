"""Digests of what several processes have copies of."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from torch_xla._core.device import client
from torch_xla._core.job import same_program

LARGE = same_program._LARGE


def digest(values: torch.Tensor, start: int = -1, length: int | None = None) -> str:
    with client.x64():
        array = jax.dlpack.from_dlpack(values) if values.dtype != torch.bool else jnp.asarray(values.numpy())
    return same_program._digest(array, "whole", array, start, length)


@pytest.mark.parametrize("count", [64, LARGE])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float64]
)
def test_equal_values_have_equal_digests_and_others_have_others(dtype: torch.dtype, count: int) -> None:
    values = (torch.arange(count) % 251 % (2 if dtype == torch.bool else 251)).to(dtype)
    one, swapped = values.clone(), values.clone()
    one[count // 2] = one[count // 2 + 1]
    swapped[[0, 1]] = swapped[[1, 0]]
    reference = digest(values)
    assert digest(values.clone()) == reference
    assert len({reference, digest(one), digest(swapped), digest(values[:-2]), digest(values.flip(0))}) == 5
    assert digest(values, 8, count // 2) == digest(values.clone(), 8, count // 2) != digest(values, 9, count // 2)


def test_a_digest_is_made_once_for_a_buffer() -> None:
    array = jnp.asarray(np.arange(8))
    first = same_program._digest(array, "whole", array, -1, None)
    assert same_program._digest(array, "whole", None, -1, None) == first
    known = len(same_program._digests)
    del array
    assert len(same_program._digests) == known - 1
