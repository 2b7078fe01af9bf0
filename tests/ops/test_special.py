"""Special functions."""

from __future__ import annotations

import math

import torch
from harness import values

from torch_xla.ops import polynomials, special

A = torch.ops.aten
X = torch.tensor([-2.3, -0.5, 0.0, 0.3, 0.9, 1.0, 2.5, 12.0, math.inf, math.nan])


@values
def test_functions():
    for name in sorted(special._FLOATING):
        yield getattr(A, name).default, X
    yield A.erf.default, torch.tensor([1, 0, 3])
    yield A.lgamma.default, torch.tensor([[1], [3]], dtype=torch.uint8)
    yield A.digamma.default, torch.tensor([0.0, -0.0, -1.0])  # poles
    for order in (0, 1, 2, 3, 4):
        yield A.polygamma.default, order, torch.tensor([-8.99, -1.1, -0.5, 0.3, 2.0, 30.0])
    yield A.polygamma.default, 2, torch.tensor([0.0, -2.0])  # poles
    a, x = torch.rand(4, 1) * 5, torch.rand(3) * 5
    yield A.igamma.default, a, x
    yield A.igammac.default, a, x
    limits = torch.tensor([0.0, 2.0, math.inf])
    yield A.igamma.default, limits[:, None], limits
    yield A.igammac.default, limits[:, None], limits
    yield A.polygamma.default, 1, torch.tensor([1e4, 4e19, math.inf])
    x, q = torch.tensor([[2.0], [3.5], [1.0], [0.5]]), torch.tensor([0.3, 2.0, 9.0])
    yield A.special_zeta.default, x, q
    yield A.special_zeta.other_scalar, torch.tensor([2, 3]), 2.5
    yield A.special_zeta.self_scalar, 2, torch.tensor([-3.0, 0.0, -1.5])


@values
def test_polynomials():
    names = sorted(polynomials._FAMILIES)
    for name in (*names, *(f"shifted_{name}" for name in names if name.startswith("chebyshev"))):
        x = torch.tensor([[-1.0], [-0.7], [0.0], [0.4], [1.0], [1.3]])
        yield getattr(A, f"special_{name}").default, x, torch.tensor([-1.0, 0.0, 1.0, 2.7, 5.0, 9.0])
    yield A.special_hermite_polynomial_he.default, torch.tensor([0.5]), torch.tensor([128, 129])  # the highest degree
