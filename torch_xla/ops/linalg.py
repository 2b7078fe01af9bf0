"""Rules for linear algebra: factorizations, solvers, distances."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import expm, polar

from torch_xla.ops import dtypes
from torch_xla.ops.reduction import vector_norm
from torch_xla.ops.registry import Context, lowers

Arrays = tuple[jax.Array, ...]


def _transposed(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def _adjoint(x: jax.Array) -> jax.Array:
    return jnp.conj(_transposed(x))


def _fine(ctx: Context, result: int) -> jax.Array:
    """An `info` result that reports success."""
    meta = ctx.out[result]
    assert meta is not None
    return jnp.zeros(meta.shape, np.int32)


def _lu(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """LU in one matrix, pivots as row swaps counted from 1, and the row permutation."""
    if x.size == 0:
        shape = (*x.shape[:-2], min(x.shape[-2:]))
        rows = jnp.broadcast_to(jnp.arange(x.shape[-2]), (*x.shape[:-2], x.shape[-2]))
        return x, jnp.zeros(shape, np.int32), rows
    lu, pivots, permutation = lax.linalg.lu(x)
    return lu, pivots + 1, permutation


def _singular(lu: jax.Array) -> jax.Array:
    """1-based position of the first zero pivot of an LU factorization, 0 if there is none; int32."""
    zero = jnp.diagonal(lu, axis1=-2, axis2=-1) == 0
    if zero.shape[-1] == 0:
        return jnp.zeros(zero.shape[:-1], np.int32)
    return jnp.where(jnp.any(zero, -1), jnp.argmax(zero, -1) + 1, 0).astype(np.int32)


def _parity(pivots: jax.Array) -> jax.Array:
    """Number of row swaps of a pivot vector."""
    return jnp.sum(pivots != jnp.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype), axis=-1)


@lowers("aten.linalg_lu_factor_ex.default")
def _lu_factor(ctx: Context, x: jax.Array, *, pivot: bool, check_errors: bool) -> Arrays:
    lu, pivots, _ = _lu(x)
    return lu, pivots, _singular(lu)


def _triangles(lu: jax.Array) -> tuple[jax.Array, jax.Array]:
    m, n = lu.shape[-2:]
    k = min(m, n)
    return jnp.tril(lu[..., :, :k], -1) + jnp.eye(m, k, dtype=lu.dtype), jnp.triu(lu[..., :k, :])


def _permutation_matrix(rows: jax.Array, dtype: np.dtype) -> jax.Array:
    """P with ``A = P L U`` from the permutation with ``A[rows] = L U``."""
    return _transposed(jax.nn.one_hot(rows, rows.shape[-1], dtype=dtype))


@lowers("aten.linalg_lu.default")
def _linalg_lu(ctx: Context, x: jax.Array, *, pivot: bool) -> Arrays:
    lu, _, rows = _lu(x)
    return _permutation_matrix(rows, x.dtype), *_triangles(lu)


@lowers("aten.lu_unpack.default")
def _lu_unpack(
    ctx: Context, lu: jax.Array, pivots: jax.Array, unpack_data: bool, unpack_pivots: bool
) -> tuple[jax.Array, ...]:
    empty = jnp.zeros((0,), lu.dtype)
    permutation = empty
    if unpack_pivots:
        rows = lax.linalg.lu_pivots_to_permutation(pivots - 1, lu.shape[-2])
        permutation = _permutation_matrix(rows, lu.dtype)
    return permutation, *(_triangles(lu) if unpack_data else (empty, empty))


def _lu_of_determinant(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The factorization that PyTorch's gradient expects of a contiguous matrix: of the transpose, where it is real."""
    lu, pivots, _ = _lu(x if jnp.iscomplexobj(x) else _transposed(x))
    return lu, pivots


@lowers("aten._linalg_det.default")
def _det(ctx: Context, x: jax.Array) -> Arrays:
    lu, pivots = _lu_of_determinant(x)
    sign = jnp.where(_parity(pivots) % 2 == 0, 1, -1).astype(x.dtype)
    return sign * jnp.prod(jnp.diagonal(lu, axis1=-2, axis2=-1), axis=-1), lu, pivots


@lowers("aten._linalg_slogdet.default")
def _slogdet(ctx: Context, x: jax.Array) -> Arrays:
    lu, pivots = _lu_of_determinant(x)
    diagonal = jnp.diagonal(lu, axis1=-2, axis2=-1)
    sign = jnp.where(_parity(pivots) % 2 == 0, 1, -1) * jnp.prod(jnp.sign(diagonal), axis=-1)
    return sign.astype(x.dtype), jnp.sum(jnp.log(jnp.abs(diagonal)), axis=-1), lu, pivots


@lowers("aten.linalg_inv_ex.default")
def _inverse(ctx: Context, x: jax.Array, *, check_errors: bool) -> Arrays:
    if x.size == 0:
        return x, _fine(ctx, 1)
    return jnp.linalg.inv(x), _singular(_lu(x)[0])


@lowers("aten._linalg_solve_ex.default")
def _solve(ctx: Context, a: jax.Array, b: jax.Array, *, left: bool, check_errors: bool) -> Arrays:
    lu, pivots, _ = _lu(a)
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    right = b[..., None] if vector else b
    system = a if left else _transposed(a)
    right = right if left else _transposed(right)
    batch = jnp.broadcast_shapes(system.shape[:-2], right.shape[:-2])
    system = jnp.broadcast_to(system, (*batch, *system.shape[-2:]))
    right = jnp.broadcast_to(right, (*batch, *right.shape[-2:]))
    x = jnp.linalg.solve(system, right) if right.size else right
    x = x if left else _transposed(x)
    return x[..., 0] if vector else x, lu, pivots, _singular(lu)


@lowers("aten.linalg_lu_solve.default")
def _lu_solve(ctx: Context, lu: jax.Array, pivots: jax.Array, b: jax.Array, *, left: bool, adjoint: bool) -> jax.Array:
    rows = lax.linalg.lu_pivots_to_permutation(pivots - 1, lu.shape[-2])
    lower, upper = _triangles(lu)
    a = jnp.matmul(_permutation_matrix(rows, lu.dtype), jnp.matmul(lower, upper))
    a = _adjoint(a) if adjoint else a
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (jnp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b))
    return jnp.linalg.solve(a, b) if left else _transposed(jnp.linalg.solve(_transposed(a), _transposed(b)))


def _cholesky_of(x: jax.Array, upper: bool) -> tuple[jax.Array, jax.Array]:
    """The factor, and PyTorch's `info`: 1 where the matrix is not positive definite."""
    factor = lax.linalg.cholesky(_adjoint(x) if upper else x, symmetrize_input=False)
    failed = jnp.any(jnp.isnan(factor), axis=(-2, -1)).astype(np.int32)
    return (_adjoint(factor) if upper else factor), failed


@lowers("aten.linalg_cholesky_ex.default")
def _cholesky_ex(ctx: Context, x: jax.Array, *, upper: bool, check_errors: bool) -> Arrays:
    return _cholesky_of(x, upper)


@lowers("aten.cholesky.default")
def _cholesky(ctx: Context, x: jax.Array, upper: bool) -> jax.Array:
    return _cholesky_of(x, upper)[0]


@lowers("aten.linalg_qr.default")
def _qr(ctx: Context, x: jax.Array, mode: str) -> Arrays:
    if mode == "r":
        return jnp.zeros((0,), x.dtype), jnp.linalg.qr(x, mode="r")
    q, r = jnp.linalg.qr(x, mode=mode)
    return q, r


def _svd_of(x: jax.Array, full_matrices: bool) -> Arrays:
    """U, the singular values, and the adjoint of V."""

    def usual(x: jax.Array) -> Arrays:
        return tuple(jnp.linalg.svd(x, full_matrices=full_matrices))

    if x.size == 0:
        return usual(x)
    # On TPUs that one multiplies by 64-bit integers, for which XLA has no products there.
    of_matrices = jnp.vectorize(lambda x: _svd_by_polar(x, full_matrices), signature="(m,n)->(m,k),(r),(l,n)")
    return lax.platform_dependent(x, tpu=lambda x: tuple(of_matrices(x)), default=usual)


def _svd_by_polar(x: jax.Array, full_matrices: bool) -> Arrays:
    """The SVD of a matrix by the polar decomposition and eigenvalues.

    Source: Nakatsukasa and Higham, "Stable and efficient spectral divide and conquer algorithms for the symmetric
    eigenvalue decomposition and the SVD", 2013.
    """
    if x.shape[0] < x.shape[1]:
        v, s, uh = _svd_by_polar(_adjoint(x), full_matrices)
        return _adjoint(uh), s, _adjoint(v)
    with jax.default_matmul_precision("highest"):
        q, r = jnp.linalg.qr(x)
        unitary, hermitian = polar(r, method="qdwh")
        s, v = (values[..., ::-1] for values in jnp.linalg.eigh(hermitian))
        # Of small singular values these columns are not orthogonal yet.
        u, r = jnp.linalg.qr(q @ (unitary @ v), mode="complete" if full_matrices else "reduced")
    turns = jnp.diagonal(r)
    turns = jnp.where(turns == 0, 1, turns / jnp.where(turns == 0, 1, jnp.abs(turns)))
    columns = jnp.arange(u.shape[1]) < turns.size
    u *= jnp.where(columns, jnp.pad(turns, (0, u.shape[1] - turns.size)), 1)
    return u, jnp.maximum(s, 0), _adjoint(v)


@lowers("aten._linalg_svd.default")
def _svd(ctx: Context, x: jax.Array, full_matrices: bool, compute_uv: bool, *, driver: str | None) -> Arrays:
    if compute_uv:
        return _svd_of(x, full_matrices)
    empty = [jnp.zeros(meta.shape if meta is not None else (0,), x.dtype) for meta in (ctx.out[0], ctx.out[2])]
    return empty[0], jnp.linalg.svd(x, compute_uv=False), empty[1]


@lowers("aten.linalg_pinv.atol_rtol_tensor")
def _pinv(ctx: Context, x: jax.Array, *, atol: jax.Array | None, rtol: jax.Array | None, hermitian: bool) -> jax.Array:
    if x.size == 0:
        return jnp.zeros(ctx.meta.shape, x.dtype)
    if hermitian:  # only the lower triangle is read
        below = jnp.tril(x, -1)
        x = below + _adjoint(below) + jnp.real(x) * jnp.eye(x.shape[-1], dtype=x.dtype)
    u, s, vh = _svd_of(x, full_matrices=False)
    absolute = jnp.zeros((), s.dtype) if atol is None else atol
    if rtol is None:
        machine = max(x.shape[-2:]) * jnp.finfo(x.dtype).eps
        # PyTorch's default relative tolerance applies only where no absolute one is given.
        rtol = jnp.where(absolute > 0, 0.0, machine)
    limit = jnp.maximum(absolute, rtol * jnp.max(s, axis=-1))[..., None]
    inverse = jnp.where(s > limit, 1 / jnp.where(s > limit, s, 1), 0)
    return jnp.matmul(_adjoint(vh) * inverse[..., None, :].astype(x.dtype), _adjoint(u))


@lowers("aten._linalg_eigh.default")
def _eigh(ctx: Context, x: jax.Array, triangle: str, compute_v: bool) -> Arrays:
    lower = triangle.upper() == "L"
    if compute_v:
        vectors, values = lax.linalg.eigh(x, lower=lower, symmetrize_input=False)
        return values, vectors
    values = lax.linalg.eigh(x, lower=lower, symmetrize_input=False)[1]
    meta = ctx.out[1]
    return values, jnp.zeros(meta.shape if meta is not None else (0,), x.dtype)


def _triangular(a: jax.Array, b: jax.Array, upper: bool, left: bool, transpose: bool, unit: bool) -> jax.Array:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a, b = (jnp.broadcast_to(x, (*batch, *x.shape[-2:])) for x in (a, b))
    if b.size == 0:
        return b
    return lax.linalg.triangular_solve(a, b, left_side=left, lower=not upper, transpose_a=transpose, unit_diagonal=unit)


@lowers("aten.linalg_solve_triangular.default")
def _solve_triangular(
    ctx: Context, a: jax.Array, b: jax.Array, *, upper: bool, left: bool, unitriangular: bool
) -> jax.Array:
    return _triangular(a, b, upper, left, False, unitriangular)


@lowers("aten.triangular_solve.default")
def _triangular_solve(
    ctx: Context, b: jax.Array, a: jax.Array, upper: bool, transpose: bool, unitriangular: bool
) -> Arrays:
    x = _triangular(a, b, upper, True, transpose, unitriangular)
    return x, jnp.broadcast_to(a, (*x.shape[:-2], *a.shape[-2:]))


@lowers("aten.cholesky_solve.default", "aten._cholesky_solve_helper.default")
def _cholesky_solve(ctx: Context, b: jax.Array, factor: jax.Array, upper: bool) -> jax.Array:
    lower = _adjoint(factor) if upper else factor
    half = _triangular(lower, b, False, True, False, False)
    return _triangular(_adjoint(lower), half, True, True, False, False)


@lowers("aten.cholesky_inverse.default")
def _cholesky_inverse(ctx: Context, factor: jax.Array, upper: bool) -> jax.Array:
    return _cholesky_solve(ctx, jnp.eye(factor.shape[-1], dtype=factor.dtype), factor, upper)


@lowers("aten.linalg_matrix_exp.default")
def _matrix_exp(ctx: Context, x: jax.Array) -> jax.Array:
    return expm(dtypes.widen(x)) if x.size else x


def _distance_grad(difference: jax.Array, distance: jax.Array, p: float) -> jax.Array:
    """Gradient of the norm over the last dimension, with PyTorch's zero at distance zero."""
    distance = distance[..., None]
    sign, magnitude = jnp.sign(difference), jnp.abs(difference)
    safe = jnp.where(distance == 0, 1, distance)
    if p == 0:
        slope = jnp.zeros_like(difference)
    elif p == 1:
        slope = sign
    elif p == 2:
        slope = difference / safe
    elif math.isinf(p):
        slope = sign * (magnitude == distance)
    else:
        positive = jnp.where(magnitude == 0, 1, magnitude)
        slope = jnp.where(magnitude == 0, 0, sign * positive ** (p - 1) / safe ** (p - 1))
    return slope if p == 1 else jnp.where(distance == 0, 0, slope)


def _pairs(a: jax.Array, b: jax.Array) -> jax.Array:
    return a[..., :, None, :] - b[..., None, :, :]


@lowers("aten._cdist_forward.default")
def _cdist(ctx: Context, a: jax.Array, b: jax.Array, p: float, compute_mode: int | None) -> jax.Array:
    longest = max(a.shape[-2], b.shape[-2])
    if p == 2 and (compute_mode == 1 or (compute_mode in (None, 0) and longest > 25)):
        return _euclidean(a, b)
    return vector_norm(_pairs(a, b), p, -1, False)


def _euclidean(a: jax.Array, b: jax.Array) -> jax.Array:
    """Distances through a matrix product: less exact, but without the array of all differences."""
    square_a = jnp.sum(jnp.square(a), axis=-1)[..., :, None]
    square_b = jnp.sum(jnp.square(b), axis=-1)[..., None, :]
    return jnp.sqrt(jnp.maximum(square_a + square_b - 2 * jnp.matmul(a, _transposed(b)), 0))


@lowers("aten._cdist_backward.default")
def _cdist_backward(
    ctx: Context, grad: jax.Array, a: jax.Array, b: jax.Array, p: float, distance: jax.Array
) -> jax.Array:
    return jnp.sum(grad[..., None] * _distance_grad(_pairs(a, b), distance, p), axis=-2)


def _upper_pairs(n: int) -> tuple[np.ndarray, np.ndarray]:
    return np.triu_indices(n, 1)


@lowers("aten._pdist_forward.default")
def _pdist(ctx: Context, x: jax.Array, p: float) -> jax.Array:
    rows, columns = _upper_pairs(x.shape[0])
    return vector_norm(x[rows] - x[columns], p, -1, False)


@lowers("aten._pdist_backward.default")
def _pdist_backward(ctx: Context, grad: jax.Array, x: jax.Array, p: float, distance: jax.Array) -> jax.Array:
    rows, columns = _upper_pairs(x.shape[0])
    slope = grad[..., None] * _distance_grad(x[rows] - x[columns], distance, p)
    return jnp.zeros_like(x).at[rows].add(slope).at[columns].add(-slope)


@lowers("aten.linalg_householder_product.default")
def _householder_product(ctx: Context, x: jax.Array, tau: jax.Array) -> jax.Array:
    return lax.linalg.householder_product(x, tau)
