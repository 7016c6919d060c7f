"""Linear algebra by LAPACK has the results of JAX, with the same signs."""

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
    """Check the references and the program. Sums of a few products may have another order."""
    vn.numba.compare_jax_and_py(f, args, rtol=1e-4)
    return vn.numba.compare_numba_and_py(f, args, rtol=1e-4, native=native)


def triangular(a, y):
    options = itertools.product((False, True), repeat=5)
    return [
        linalg.triangular_solve(
            a,
            y if left else y.swapaxes(-1, -2),
            left_side=left,
            lower=lower,
            transpose_a=turned,
            unit_diagonal=unit,
            conjugate_a=conjugate,
        )
        for conjugate, left, lower, turned, unit in options
    ]


def test_triangular_systems_of_all_kinds_agree_with_jax():
    both(triangular, [A, Y])


@pytest.mark.parametrize("place", ["right side", "matrix", "diagonal"])
def test_triangular_systems_with_infinities_agree_with_jax(place):
    n = 9  # more than one block of OpenBLAS
    a = (np.eye(n) + 0.1 * RANDOM.normal(size=(n, n))).astype(np.float32)
    y = RANDOM.normal(size=(n, n)).astype(np.float32)
    where = {"right side": (y, (3, 1)), "matrix": (a, (5, 2)), "diagonal": (a, (4, 4))}
    array, index = where[place]
    array[index] = 0 if place == "diagonal" else -np.inf
    expected = jax.jit(triangular)(a, y)
    for result, dense in zip(vn.numba.compile(triangular, a, y)(a, y), expected, strict=True):
        np.testing.assert_array_equal(result, dense)


def test_cholesky_of_an_indefinite_matrix_is_nan():
    result = both(jnp.linalg.cholesky, [np.stack([POSITIVE[0], -POSITIVE[1]])])
    assert np.isfinite(result[0]).all()
    assert np.isnan(result[1][np.tril_indices(4)]).all()


SHAPES = {"square": A, "wide": A[:, :3], "tall": A[:, :, :3], "one": A[0]}


@pytest.mark.parametrize("a", SHAPES.values(), ids=SHAPES)
def test_factors_of_all_shapes_agree_with_jax(a):
    def f(a):
        return {
            "lu": linalg.lu(a),
            "raw": jnp.linalg.qr(a, mode="raw"),
            "qr": [linalg.qr(a, full_matrices=full) for full in (False, True)],
            "pivoted": [linalg.qr(a, pivoting=True, full_matrices=full) for full in (False, True)],
            "svd": [linalg.svd(a, full_matrices=full) for full in (False, True)],
            "values": linalg.svd(a, compute_uv=False),
        }

    both(f, [a])


def test_a_singular_matrix_has_an_lu():
    both(lambda a: linalg.lu(a), [np.zeros((3, 3), np.float32)])


def test_eigenvectors_from_either_triangle_agree_with_jax():
    def f(a):
        own = [linalg.eigh(a, lower=lower, symmetrize_input=False) for lower in (True, False)]
        return [own, jnp.linalg.eigvalsh(a)]

    both(f, [POSITIVE])
    vn.numba.compare_numba_and_py(f, [np.full((2, 2), np.nan, np.float32)], native=False)


def test_a_tridiagonal_system_with_pivoting_agrees_with_jax():
    y = RANDOM.normal(size=(2, 5, 2)).astype(np.float32)
    small = np.full((2, 5), 1e-3, np.float32)
    both(linalg.tridiagonal_solve, [BAND, small, BAND + 1, y])


def test_native_code_agrees_with_the_references():
    def f(a, positive, y):
        return {
            "cholesky": linalg.cholesky(positive),
            "triangular": [triangular(a, y)[n] for n in (0, 15, 18)],
            "lu": linalg.lu(a),
            "qr": [linalg.qr(a), linalg.qr(a, pivoting=True)],
            "svd": [linalg.svd(a), linalg.svd(a[:, :3], compute_uv=False)],
            "eigh": linalg.eigh(positive),
            "schur": linalg.schur(a),
            "tridiagonal": linalg.tridiagonal_solve(a[:, 0], a[:, 1], a[:, 2], y),
        }

    both(f, [A, POSITIVE, Y], native=True)


def test_float64_agrees_with_jax():
    def f(positive, y):
        factor = linalg.cholesky(positive)
        solved = linalg.triangular_solve(factor, y, left_side=True, lower=True)
        return factor, solved, linalg.schur(positive), linalg.eig(positive)

    with jax.enable_x64(True):
        args = [x.astype(np.float64) for x in (POSITIVE, Y)]
        vn.numba.compare_jax_and_py(f, args, rtol=1e-10)
        vn.numba.compare_numba_and_py(f, args, rtol=1e-10)


def test_a_gradient_of_a_log_density_agrees_with_jax():
    def log_density(positive, y):
        factor = jnp.linalg.cholesky(positive)
        z = linalg.triangular_solve(factor, y, left_side=True, lower=True)
        return -0.5 * (z * z).sum() - jnp.log(jnp.diagonal(factor, axis1=1, axis2=2)).sum()

    f = jax.grad(log_density)
    result = vn.numba.compare_numba_and_py(f, [POSITIVE, Y], rtol=1e-4, native=False)
    np.testing.assert_allclose(result, f(POSITIVE, Y), rtol=1e-3, atol=1e-4)


def test_matrices_of_integers_raise():
    # Newer JAX raises itself, while it traces.
    with pytest.raises((NotImplementedError, TypeError), match="float16"):
        vn.numba.compile(lambda x: linalg.cholesky_p.bind(x), np.eye(2, dtype=np.float16))


@pytest.mark.parametrize("pivots", [[2, 1], [7, 1], [10**9, 1], [-5, 1]], ids=str)
def test_pivots_out_of_bounds_write_nowhere(pivots):
    order = lambda p: linalg.lu_pivots_to_permutation(p, 3)
    args = [np.array(pivots, np.int32)]
    np.testing.assert_array_equal(vn.numba.compile(order, *args)(*args), order(*args))


def test_a_tridiagonal_system_can_have_one_equation():
    d = np.full(1, 2, np.float32)
    solve = lambda d: linalg.tridiagonal_solve(d * 0, d, d * 0, d[:, None])
    vn.numba.compare_numba_and_py(solve, [d], native=False)


DTYPES = {"float32": 3e-4, "float64": 1e-10, "complex64": 3e-4, "complex128": 1e-10}


@pytest.fixture(params=DTYPES)
def dtype(request):
    with jax.enable_x64(request.param in ("float64", "complex128")):
        yield request.param


def matrices(dtype, *shape):
    random = np.random.default_rng(1)
    parts = random.normal(size=(2, *shape))
    return (parts[0] + 1j * parts[1] if "complex" in dtype else parts[0]).astype(dtype)


def factors(a):
    positive = a @ jnp.conj(a.mT) + jnp.eye(a.shape[-1], dtype=a.dtype)
    return {
        "cholesky": linalg.cholesky(positive),
        "lu": [linalg.lu(a), linalg.lu(a[..., :2]), linalg.lu(a * 0)],
        "qr": [linalg.qr(x, full_matrices=f) for f in (False, True) for x in (a, a[..., :2])],
        "pivoted": [linalg.qr(x, pivoting=True) for x in (a, a[..., :2], a[..., :2, :])],
        "svd": [linalg.svd(a[..., :2, :]), linalg.svd(a, compute_uv=False)],
        "eigh": [linalg.eigh(positive, lower=low, symmetrize_input=False) for low in (True, False)],
        "schur": [linalg.schur(a), linalg.schur(a, compute_schur_vectors=False)],
        "eig": [
            linalg.eig(a, compute_left_eigenvectors=left, compute_right_eigenvectors=right)
            for left, right in itertools.product((False, True), repeat=2)
        ],
        "solved": [jnp.linalg.solve(a, positive), jnp.linalg.det(a), jnp.linalg.inv(positive)],
        "triangular": triangular(a, a[..., :2]),
        "tridiagonal": linalg.tridiagonal_solve(a[..., 0], a[..., 1], a[..., 2], a),
    }


def test_factors_of_all_dtypes_agree_with_jax(dtype):
    args, rtol = [matrices(dtype, 2, 3, 3)], DTYPES[dtype]
    vn.numba.compare_jax_and_py(factors, args, rtol=rtol)
    native = dtype.startswith("complex")  # real matrices are compiled above
    vn.numba.compare_numba_and_py(factors, args, rtol=rtol, native=native)


def test_eigenvectors_of_conjugates_and_infinities_agree():
    turn = np.array([[0, -1, 0], [1, 0, 0], [0, 0, 2]], np.float32)
    nan = np.full((3, 3), np.nan, np.float32)
    infinite = np.where(np.eye(3) == 1, np.inf, turn).astype(np.float32)
    values, *vectors = both(linalg.eig, [np.stack([turn, nan, turn, infinite])], native=True)
    assert np.isfinite(values[[0, 2]]).all()
    assert np.isnan(values[[1, 3]]).all()
    assert all(np.isnan(v[[1, 3]]).all() for v in vectors)


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0), (2, 3, 0), (0, 3, 3)], ids=str)
def test_empty_matrices_can_be_factored(shape, dtype):
    def f(x):
        results = [linalg.lu(x), linalg.svd(x), linalg.svd(x, full_matrices=False)]
        results += [linalg.svd(x, compute_uv=False)]
        if x.shape[0]:
            results += [
                linalg.qr(x),
                linalg.qr(x, pivoting=True),
                linalg.qr(x, full_matrices=False),
            ]
        if x.shape[-1] == x.shape[-2]:
            results += [g(x) for g in (linalg.cholesky, linalg.eigh, linalg.schur, linalg.eig)]
            results += [g(x) for g in (jnp.linalg.det, jnp.linalg.inv)]
            results += [linalg.triangular_solve(x, x, left_side=True)]
        return results

    both(f, [np.zeros(shape, dtype)])


def test_systems_can_have_no_right_sides_or_reflections():
    solve = lambda a: [linalg.triangular_solve(a, a[..., :0], left_side=True)]
    both(solve, [A])
    both(linalg.householder_product, [A, np.zeros((2, 0), np.float32)])


def test_errors_name_unsupported_options():
    with pytest.raises(NotImplementedError, match="sort_eig_vals: True"):
        vn.numba.compile(lambda a: linalg.schur(a, sort_eig_vals=True), A[0])
