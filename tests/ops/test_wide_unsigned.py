"""uint16, uint32 and uint64: PyTorch's CPU kernels know few operators of them, so NumPy says what is right."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import torch_xla

XLA = torch_xla.device()
TYPES = (np.uint16, np.uint32, np.uint64)
OPERATORS = {
    "add": (torch.add, np.add),
    "sub": (torch.sub, np.subtract),
    "floor_divide": (torch.floor_divide, np.floor_divide),
    "remainder": (torch.remainder, np.remainder),
    "fmod": (torch.fmod, np.fmod),
    "lt": (torch.lt, np.less),
    "ge": (torch.ge, np.greater_equal),
    "minimum": (torch.minimum, np.minimum),
    "maximum": (torch.maximum, np.maximum),
    "shift left": (lambda a, b: a << (b & 7), lambda a, b: a << (b & a.dtype.type(7))),
    "shift right": (lambda a, b: a >> (b & 7), lambda a, b: a >> (b & a.dtype.type(7))),
    "neg": (lambda a, b: -a, lambda a, b: -a),
    "not": (lambda a, b: ~a, lambda a, b: ~a),
    "square": (lambda a, b: a**2, lambda a, b: a**2),
    "clamp": (lambda a, b: a.clamp(3, 9), lambda a, b: a.clip(3, 9)),
    "flip": (lambda a, b: a.flip(0), lambda a, b: a[::-1]),
    "sort": (lambda a, b: a.sort().values, lambda a, b: np.sort(a)),
    "amax": (lambda a, b: a.max(), lambda a, b: a.max()),
    "argmin": (lambda a, b: a.argmin(), lambda a, b: a.argmin()),
    "gather": (lambda a, b: a.gather(0, torch.tensor([3, 1], device=a.device)), lambda a, b: a[[3, 1]]),
    "matmul": (lambda a, b: a @ b, lambda a, b: a @ b),
    "in place": (lambda a, b: a.clone().sub_(b).bitwise_not_(), lambda a, b: ~(a - b)),
    "a part": (lambda a, b: a.index_fill(0, torch.tensor([1], device=a.device), 7)[1:], lambda a, b: np.r_[[7], a[2:]]),
    "arange": (lambda a, b: torch.arange(4, dtype=a.dtype, device=a.device), lambda a, b: np.arange(4, dtype=a.dtype)),
}


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.__name__)
@pytest.mark.parametrize("name", OPERATORS)
def test_as_numpy(name: str, dtype: type) -> None:
    ours, theirs = OPERATORS[name]
    most = np.iinfo(dtype).max
    a, b = np.array([2, 3, most, most - 5], dtype), np.array([1, 7, 2, most], dtype)
    result = ours(*(torch.from_numpy(x).to(XLA) for x in (a, b)))
    assert result.device.type == "xla"
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(result.cpu().numpy(), theirs(a, b))


def test_what_is_still_refused() -> None:
    words = torch.ones(2, dtype=torch.uint32, device=XLA)
    with pytest.raises(RuntimeError, match="Promotion for uint16, uint32, uint64 types is not supported"):
        words + torch.ones(2, dtype=torch.int32, device=XLA)
    with pytest.raises(NotImplementedError, match="not implemented for 'UInt32'"):  # it has no lowering
        torch.geqrf(words.view(1, 2))
    assert words.tolist() == [1, 1]


LARGE = 2**63 + 5


def _some(device, *values):
    return torch.tensor(values, dtype=torch.uint64).to(device)


def _filled(device, *sizes):
    return torch.full(sizes, LARGE, dtype=torch.uint64, device=device)


LARGE_NUMBERS = {
    "fill": lambda d: _filled(d, 3),
    "fill that is read": lambda d: _filled(d, 3).to(torch.float64) + 1.0,
    "fill of one": lambda d: _filled(d) == _some(d, 1, LARGE),
    "in place": lambda d: _some(d, 1, 2).fill_(LARGE),
    "comparison": lambda d: _some(d, 1, LARGE).eq(LARGE),
    "choice": lambda d: _some(d, 1, LARGE) if d == "cpu" else torch.where(_some(d, 1, 0) == 1, _some(d, 1, 2), LARGE),
    "bits": lambda d: _some(d, 1, LARGE, 3).bitwise_and(LARGE),
}


@pytest.mark.parametrize("name", LARGE_NUMBERS)
def test_numbers_that_no_signed_integer_holds(name):
    for _ in range(2):
        result = LARGE_NUMBERS[name]("xla")
        torch_xla.sync()
        assert torch.equal(result.cpu(), LARGE_NUMBERS[name]("cpu"))
