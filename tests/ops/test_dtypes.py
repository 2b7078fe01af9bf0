"""Type conversion and promotion against PyTorch's own answers."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from torch_xla.ops import dtypes
from torch_xla.ops.registry import NumberInput

TYPES = (torch.bool, torch.uint8, torch.int8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
NUMBERS = (True, 2, 2.5, 1j)


@pytest.fixture(autouse=True)
def wide_types():
    with jax.enable_x64(True):
        yield


def expected_type(left, right):
    # XLA has no half-precision complex numbers; single precision stands in.
    dtype = torch.result_type(left, right)
    return torch.complex64 if dtype.is_complex and dtype.itemsize == 4 else dtype


def array(shape, dtype):
    return jnp.zeros(shape, dtypes.numpy_dtype(dtype))


@pytest.mark.parametrize("left", (*TYPES, torch.complex64), ids=str)
def test_result_type_of_tensors(left):
    for right, shape in itertools.product((*TYPES, torch.complex64), [(2,), ()]):
        expected = expected_type(torch.zeros(2, dtype=left), torch.zeros(shape, dtype=right))
        assert dtypes.result_type(array((2,), left), array(shape, right)) == expected


@pytest.mark.parametrize("number", NUMBERS, ids=repr)
@pytest.mark.parametrize("shape", [(2,), ()], ids=str)
def test_result_type_with_numbers(number, shape):
    for dtype in TYPES:
        expected = expected_type(torch.zeros(shape, dtype=dtype), number)
        lifted = NumberInput(jnp.asarray(number), type(number))
        assert dtypes.result_type(array(shape, dtype), number) == expected
        assert dtypes.result_type(array(shape, dtype), lifted) == expected


@pytest.mark.parametrize("target", TYPES, ids=str)
def test_cast(target):
    values = [-129.7, -1.5, 0.0, 0.4, 130.2, 300.0]
    expected = torch.tensor(values).to(target).double()
    got = np.asarray(dtypes.cast(jnp.asarray(values, jnp.float32), target)).astype(np.float64)
    np.testing.assert_array_equal(got, expected.numpy())


def test_cast_wraps_numbers():
    assert int(dtypes.cast(300, torch.uint8)) == 44
    assert int(dtypes.cast(-1, torch.uint8)) == 255


def test_cast_drops_the_imaginary_part():
    assert float(dtypes.cast(1.5 + 2j, torch.float32)) == 1.5
    assert bool(dtypes.cast(2j, torch.bool))


def test_unknown_type():
    with pytest.raises(TypeError, match=r"\[dtype\] torch.complex32"):
        dtypes.numpy_dtype(torch.complex32)


def test_computation_types():
    half, whole = array((2,), torch.bfloat16), array((2,), torch.int32)
    assert dtypes.compute_type(half) == torch.float32
    assert dtypes.compute_type(whole) == torch.int32
    assert dtypes.compute_type(whole, floating=True) == torch.float32
    assert [x.shape for x in dtypes.promote(half, 2)] == [(2,), (2,)]
