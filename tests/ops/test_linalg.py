"""Linear algebra and Fourier transforms."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from harness import lower, values

from torch_xla._core.device import client
from torch_xla.ops import linalg

A = torch.ops.aten
TOL = {"rtol": 1e-3, "atol": 1e-3}
SQUARE = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(0))
POSITIVE = SQUARE @ SQUARE.mT + torch.eye(4)
LOWER = torch.linalg.cholesky(POSITIVE)
LU, PIVOTS, _ = A.linalg_lu_factor_ex.default(SQUARE)


@values
def test_values():
    yield from [
        (A.linalg_inv_ex.default, SQUARE),
        (A.linalg_inv_ex.default, torch.randn(4, 4, dtype=torch.float64)),
        (A.linalg_inv_ex.default, torch.zeros(0, 3, 3)),
        (A.linalg_cholesky_ex.default, POSITIVE),
        (A.linalg_cholesky_ex.default, POSITIVE, {"upper": True}),
        *([(A.cholesky.default, POSITIVE)] if hasattr(A, "cholesky") else []),  # up to PyTorch 2.13
        (A.cholesky_solve.default, torch.randn(2, 4, 3), LOWER),
        (A.cholesky_inverse.default, LOWER),
        (A._linalg_det.default, SQUARE),
        (A._linalg_det.default, torch.randn(3, 3, dtype=torch.complex64)),
        (A._linalg_slogdet.default, SQUARE),
        (A.linalg_lu_factor_ex.default, torch.randn(2, 5, 3)),
        (A.linalg_lu.default, torch.randn(2, 3, 5)),
        (A.lu_unpack.default, LU, PIVOTS),
        (A.linalg_lu_solve.default, LU, PIVOTS, torch.randn(2, 4, 3)),
        (A._linalg_solve_ex.default, SQUARE, torch.randn(2, 4, 3)),
        (A._linalg_solve_ex.default, SQUARE, torch.randn(2, 4)),
        (A._linalg_solve_ex.default, SQUARE, torch.randn(2, 3, 4), {"left": False}),
        (A.linalg_solve_triangular.default, SQUARE.tril() + torch.eye(4), torch.randn(2, 4, 3), {"upper": False}),
        (
            A.linalg_solve_triangular.default,
            *(SQUARE.triu() + torch.eye(4), torch.randn(2, 3, 4)),
            {"upper": True, "left": False, "unitriangular": True},
        ),
        (A.triangular_solve.default, torch.randn(2, 4, 3), SQUARE.triu() + 3 * torch.eye(4)),
        (A.triangular_solve.default, torch.randn(2, 4, 3), SQUARE.triu() + 3 * torch.eye(4), True, True),
        (A.linalg_pinv.atol_rtol_tensor, torch.randn(2, 5, 3)),
        (A.linalg_pinv.atol_rtol_tensor, POSITIVE, {"hermitian": True}),
        (A.linalg_matrix_exp.default, SQUARE),
        (A.linalg_matrix_exp.default, torch.zeros(2, 2, dtype=torch.bfloat16)),
        (A.linalg_cross.default, torch.randn(4, 3), torch.randn(4, 3)),
        (A.linalg_cross.default, torch.randn(3, 4), torch.randn(3, 4), {"dim": 0}),
        (A.trace.default, torch.randn(3, 5)),
        (A.trace.default, torch.arange(9).reshape(3, 3)),
        (A._cdist_forward.default, torch.randn(2, 30, 3), torch.randn(2, 5, 3), 2.0, None),
        (A._cdist_forward.default, torch.randn(2, 4, 3), torch.randn(2, 5, 3), 2.0, 2),
        (A._cdist_forward.default, torch.randn(4, 3), torch.randn(5, 3), math.inf, None),
        (A._cdist_forward.default, torch.randn(4, 3), torch.randn(5, 3), 1.5, None),
        (A._euclidean_dist.default, torch.randn(4, 3), torch.randn(5, 3)),
        (A._pdist_forward.default, torch.randn(5, 3), 2.0),
        (A._pdist_forward.default, torch.randn(5, 3), 0.0),
    ]
    for p in (0.0, 1.0, 1.5, 2.0, 3.0, math.inf):
        a, b = torch.randn(4, 3), torch.randn(5, 3)
        b[0] = a[0]
        yield A._cdist_backward.default, torch.randn(4, 5), a, b, p, A._cdist_forward.default(a, b, p, 2)
        yield A._pdist_backward.default, torch.randn(6), a, p, A._pdist_forward.default(a, p)
    for cutoff in ({"rtol": torch.tensor(0.5)}, {"atol": torch.tensor(0.9)}):  # of small singular values
        yield A.linalg_pinv.atol_rtol_tensor, SQUARE, cutoff


@pytest.mark.parametrize("shape", [(2, 5, 3), (3, 5), (4, 4)])
@pytest.mark.parametrize("mode", ["reduced", "complete", "r"])
def test_qr_multiplies_back(shape, mode):
    x = torch.randn(shape)
    q, r = lower(A.linalg_qr.default, x, mode)
    if mode == "r":
        q, r = A.linalg_qr.default(x, "reduced")[0], r
        torch.testing.assert_close(r.mT @ r, x.mT @ x, **TOL)
        return
    torch.testing.assert_close(q @ r, x, **TOL)
    torch.testing.assert_close(q.mT @ q, torch.eye(q.shape[-1]).expand(*x.shape[:-2], -1, -1), **TOL)


@pytest.mark.parametrize("full", [False, True])
def test_svd_multiplies_back(full):
    x = torch.randn(2, 5, 3)
    u, s, vh = lower(A._linalg_svd.default, x, full)
    torch.testing.assert_close(u[..., :3] * s[..., None, :] @ vh, x, **TOL)
    torch.testing.assert_close(s, torch.linalg.svdvals(x), **TOL)
    torch.testing.assert_close(lower(A._linalg_svd.default, x, full, False)[1], s, **TOL)


@pytest.mark.parametrize("triangle", ["L", "U"])
def test_eigh_multiplies_back(triangle):
    values, vectors = lower(A._linalg_eigh.default, POSITIVE, triangle)
    torch.testing.assert_close(vectors * values[..., None, :] @ vectors.mT, POSITIVE, **TOL)
    torch.testing.assert_close(lower(A._linalg_eigh.default, POSITIVE, triangle, False)[0], values, **TOL)


def test_failures_are_reported_in_info():
    _, info = lower(A.linalg_cholesky_ex.default, -torch.eye(3))
    assert info.item() != 0
    _, info = lower(A.linalg_inv_ex.default, torch.zeros(2, 2))
    assert info.item() == 1


@pytest.mark.parametrize("kind", ["full rank", "rank one", "zero"])
@pytest.mark.parametrize("shape", [(4, 4), (6, 4), (4, 6), (1, 1), (5, 1), (1, 5), (40, 30)])
@pytest.mark.parametrize(("dtype", "near"), [(np.float32, 1e-4), (np.float64, 1e-11), (np.complex64, 1e-4)])
@pytest.mark.parametrize("full_matrices", [False, True])
def test_singular_values_as_tpus_compute_them(full_matrices, dtype, near, shape, kind):
    draw = np.random.default_rng(0)
    x = draw.normal(size=shape) + (1j * draw.normal(size=shape) if dtype == np.complex64 else 0)
    x = {"full rank": x, "rank one": x[:, :1] @ x[:1], "zero": 0 * x}[kind].astype(dtype)
    with client.x64():
        u, s, vh = (np.asarray(part) for part in linalg._svd_by_polar(jnp.asarray(x), full_matrices))
    expected = np.linalg.svd(x, full_matrices=full_matrices)
    assert [part.shape for part in (u, s, vh)] == [part.shape for part in expected]
    assert [part.dtype for part in (u, s, vh)] == [part.dtype for part in expected]
    near *= max(1, expected[1].max())
    for got, reference in (
        (s, expected[1]),
        ((u[:, : s.size] * s) @ vh[: s.size], x),
        (u.conj().T @ u, np.eye(u.shape[1])),
        (vh @ vh.conj().T, np.eye(vh.shape[0])),
    ):
        np.testing.assert_allclose(got, reference, rtol=0, atol=near)
