"""Linear algebra of compiled programs: LAPACK's results, with its signs."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import linalg

import veneer as vn

RANDOM = np.random.default_rng(0)
A = RANDOM.normal(size=(2, 4, 4)).astype(np.float32)
POSITIVE = A @ A.swapaxes(-1, -2) + np.eye(4, dtype=np.float32)
Y = RANDOM.normal(size=(2, 4, 3)).astype(np.float32)
BAND = RANDOM.normal(size=(2, 5)).astype(np.float32)


def both(f, args, native=False):
    """Sums of a few products, in another order."""
    vn.numba.compare_jax_and_py(f, args, rtol=1e-4)
    return vn.numba.compare_numba_and_py(f, args, rtol=1e-4, native=native)


def triangular(a, y):
    return [
        linalg.triangular_solve(
            a,
            y if left else y.swapaxes(-1, -2),
            left_side=left,
            lower=lower,
            transpose_a=turned,
            unit_diagonal=unit,
        )
        for left, lower, turned, unit in itertools.product((False, True), repeat=4)
    ]


def test_triangular_systems_of_all_kinds():
    both(triangular, [A, Y])


def test_cholesky_gives_nan_for_what_is_not_positive():
    result = both(jnp.linalg.cholesky, [np.stack([POSITIVE[0], -POSITIVE[1]])])
    assert np.isfinite(result[0]).all()
    assert np.isnan(result[1][np.tril_indices(4)]).all()


SHAPES = {"square": A, "wide": A[:, :3], "tall": A[:, :, :3], "one": A[0]}


@pytest.mark.parametrize("a", SHAPES.values(), ids=SHAPES)
def test_factors_of_all_shapes(a):
    def f(a):
        return {
            "lu": linalg.lu(a),
            "raw": jnp.linalg.qr(a, mode="raw"),
            "qr": [linalg.qr(a, full_matrices=full) for full in (False, True)],
            "svd": [linalg.svd(a, full_matrices=full) for full in (False, True)],
            "values": linalg.svd(a, compute_uv=False),
        }

    both(f, [a])


def test_a_singular_matrix_has_an_lu():
    both(lambda a: linalg.lu(a), [np.zeros((3, 3), np.float32)])


def test_eigenvectors_of_either_triangle():
    def f(a):
        own = [linalg.eigh(a, lower=lower, symmetrize_input=False) for lower in (True, False)]
        return [own, jnp.linalg.eigvalsh(a)]

    both(f, [POSITIVE])
    vn.numba.compare_numba_and_py(f, [np.full((2, 2), np.nan, np.float32)], native=False)


def test_a_tridiagonal_system_that_takes_pivots():
    y = RANDOM.normal(size=(2, 5, 2)).astype(np.float32)
    small = np.full((2, 5), 1e-3, np.float32)
    both(linalg.tridiagonal_solve, [BAND, small, BAND + 1, y])


def test_compiled():
    def f(a, positive, y):
        return {
            "cholesky": linalg.cholesky(positive),
            "triangular": [triangular(a, y)[n] for n in (0, 15)],
            "lu": linalg.lu(a),
            "qr": linalg.qr(a),
            "svd": [linalg.svd(a), linalg.svd(a[:, :3], compute_uv=False)],
            "eigh": linalg.eigh(positive),
            "tridiagonal": linalg.tridiagonal_solve(a[:, 0], a[:, 1], a[:, 2], y),
        }

    both(f, [A, POSITIVE, Y], native=True)


def test_float64():
    def f(positive, y):
        factor = linalg.cholesky(positive)
        return factor, linalg.triangular_solve(factor, y, left_side=True, lower=True)

    with jax.enable_x64(True):
        args = [x.astype(np.float64) for x in (POSITIVE, Y)]
        vn.numba.compare_jax_and_py(f, args)
        vn.numba.compare_numba_and_py(f, args)


def test_a_gradient_of_a_log_density():
    def log_density(positive, y):
        factor = jnp.linalg.cholesky(positive)
        z = linalg.triangular_solve(factor, y, left_side=True, lower=True)
        return -0.5 * (z * z).sum() - jnp.log(jnp.diagonal(factor, axis1=1, axis2=2)).sum()

    f = jax.grad(log_density)
    result = vn.numba.compare_numba_and_py(f, [POSITIVE, Y], rtol=1e-4, native=False)
    np.testing.assert_allclose(result, f(POSITIVE, Y), rtol=1e-3, atol=1e-4)


def test_complex_matrices_are_refused():
    with pytest.raises(NotImplementedError, match="complex64 is not supported"):
        vn.numba.compile(linalg.cholesky, np.eye(2, dtype=np.complex64))


@pytest.mark.parametrize("pivots", [[2, 1], [7, 1], [10**9, 1], [-5, 1]], ids=str)
def test_pivots_out_of_bounds_write_nowhere(pivots):
    order = lambda p: linalg.lu_pivots_to_permutation(p, 3)
    args = [np.array(pivots, np.int32)]
    np.testing.assert_array_equal(vn.numba.compile(order, *args)(*args), order(*args))


def test_a_tridiagonal_system_of_one_equation():
    d = np.full(1, 2, np.float32)
    solve = lambda d: linalg.tridiagonal_solve(d * 0, d, d * 0, d[:, None])
    vn.numba.compare_numba_and_py(solve, [d], native=False)
