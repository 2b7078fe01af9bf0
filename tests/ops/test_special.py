"""Special functions."""

from __future__ import annotations

import math

import pytest
import torch
from harness import check

from torch_xla.ops import polynomials, special

A = torch.ops.aten
X = torch.tensor([-2.3, -0.5, 0.0, 0.3, 0.9, 1.0, 2.5, 12.0, math.inf, math.nan])
TOLERANCE = {"rtol": 2e-5, "atol": 1e-6}


@pytest.mark.parametrize("name", sorted(special._FLOATING))
def test_floating(name):
    check(getattr(A, name).default, X, **TOLERANCE)


def test_integers():
    check(A.erf.default, torch.tensor([1, 0, 3]), **TOLERANCE)
    check(A.lgamma.default, torch.tensor([[1], [3]], dtype=torch.uint8), **TOLERANCE)


def test_digamma_poles():
    check(A.digamma.default, torch.tensor([0.0, -0.0, -1.0]))


@pytest.mark.parametrize("order", [0, 1, 2, 3, 4])
def test_polygamma(order):
    check(A.polygamma.default, order, torch.tensor([-8.99, -1.1, -0.5, 0.3, 2.0, 30.0]), rtol=1e-4, atol=1e-6)


def test_polygamma_poles():
    check(A.polygamma.default, 2, torch.tensor([0.0, -2.0]))


def test_incomplete_gamma():
    a, x = torch.rand(4, 1) * 5, torch.rand(3) * 5
    check(A.igamma.default, a, x, **TOLERANCE)
    check(A.igammac.default, a, x, **TOLERANCE)


def test_zeta():
    x, q = torch.tensor([[2.0], [3.5], [1.0], [0.5]]), torch.tensor([0.3, 2.0, 9.0])
    check(A.special_zeta.default, x, q, **TOLERANCE)
    check(A.special_zeta.other_scalar, torch.tensor([2, 3]), 2.5, **TOLERANCE)
    check(A.special_zeta.self_scalar, 2, torch.tensor([-3.0, 0.0, -1.5]), **TOLERANCE)


POLYNOMIALS = sorted(polynomials._FAMILIES)


@pytest.mark.parametrize("name", POLYNOMIALS + [f"shifted_{n}" for n in POLYNOMIALS if n.startswith("chebyshev")])
def test_polynomials(name):
    x = torch.tensor([[-1.0], [-0.7], [0.0], [0.4], [1.0], [1.3]])
    degree = torch.tensor([-1.0, 0.0, 1.0, 2.7, 5.0, 9.0])
    check(getattr(A, f"special_{name}").default, x, degree, rtol=1e-4, atol=1e-5)


def test_the_highest_degree_of_hermite_polynomials():
    check(A.special_hermite_polynomial_he.default, torch.tensor([0.5]), torch.tensor([128, 129]), rtol=1e-3, atol=0.0)
