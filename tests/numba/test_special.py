"""Special functions, in densities, layers and optimizers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import veneer as vn

XS = [0.1, 2.5, 60.0, -0.3, -1.0, np.inf, np.nan]
#: First operands beside those.
ORDERS = [1.0, 3.0, 0.0, 1.0, 0.5, -1.0, 2.0]
EXPONENTS = [1.5, 4.0, 10.0, 3.0, 1.0, 2.0, 3.0]


def of_each(x, n, s):
    return {
        "digamma": lax.digamma(x),
        "i0e": lax.bessel_i0e(x),
        "i1e": lax.bessel_i1e(x),
        "log2": jnp.log2(jnp.abs(x)),
        "polygamma": lax.polygamma(n, x),
        "zeta": lax.zeta(s, x),
    }


def of_loops(a, x):
    return {
        "igamma": lax.igamma(a, x),
        "igammac": lax.igammac(a, x),
        "by a": lax.igamma_grad_a(a, x),
        "of samples": lax.random_gamma_grad(a, x),
        "betainc": lax.betainc(a, jnp.full_like(a, 0.7), jnp.minimum(x, 0.8)),
    }


def _assert_close(result, expected, rtol):
    for name, want in expected.items():
        found, want = np.asarray(result[name], np.float64), np.asarray(want, np.float64)
        np.testing.assert_allclose(found, want, rtol, 1e-30, err_msg=name)


@pytest.mark.parametrize(("dtype", "rtol"), [("float64", 1e-12), ("bfloat16", 1e-2)])
def test_special_functions_agree_with_jax(dtype, rtol):
    with jax.enable_x64(dtype == "float64"):
        args = [np.asarray(v, jnp.dtype(dtype)) for v in (XS, ORDERS, EXPONENTS)]
        result = vn.numba.compare_numba_and_py(of_each, args, native=False, rtol=rtol)
        _assert_close(result, jax.jit(of_each)(*args), rtol)


def test_zeta_at_and_far_from_poles_agrees_with_jax():
    """Far from the pole, terms of the series are infinity times zero."""
    grids = np.meshgrid([50, 88, 150, 2, 0, -2, -3, 1], [1, 0.5, 2, 30, 1e4, 0, -1, -2, -0.5])
    args = [x.reshape(-1).astype(np.float32) for x in grids]
    result = vn.numba.compare_numba_and_py(lax.zeta, args, native=False)
    np.testing.assert_allclose(result, jax.jit(lax.zeta)(*args), 1e-4)


def test_special_functions_with_loops_agree_with_jax():
    args = [np.array(v, np.float32) for v in ([0.3, 2.5, -1.0], [0.5, 4.0, 1.0])]
    result = vn.numba.compare_numba_and_py(of_loops, args, native=False, rtol=1e-4)
    _assert_close(result, jax.jit(of_loops)(*args), 1e-4)


def test_half_precision_is_computed_in_float32():
    f = lambda a, x: {"igamma": lax.igamma(a, x)}
    args = [np.array([v], np.float16) for v in (0.7, 0.4)]
    result = vn.numba.compare_numba_and_py(f, args, native=False)
    _assert_close(result, jax.jit(f)(*args), 1e-3)


def test_native_special_functions_agree_with_jax():
    f = lambda a, x: {"digamma": lax.digamma(x), "igamma": lax.igamma(a, x), "log2": jnp.log2(x)}
    args = [np.array(v, np.float32) for v in ([1.0, 2], [0.5, 4])]
    _assert_close(vn.numba.compile(f, *args)(*args), jax.jit(f)(*args), 1e-5)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_digamma_of_zero_is_minus_infinity(zero):
    """JAX returns NaN before version 0.12."""
    f = lambda x: lax.digamma(x)
    result = vn.numba.compare_numba_and_py(f, [np.float32(zero)], native=False)
    np.testing.assert_array_equal(result, -np.inf)


def test_densities_and_their_derivatives_agree_with_jax():
    def f(x, a):
        log_density = lambda a: jax.scipy.stats.gamma.logpdf(x, a).sum()
        return jax.grad(log_density)(a), jax.scipy.stats.beta.cdf(x / 4, a, 2.0)

    args = [np.array([0.5, 1, 3], np.float32), np.float32(1.5)]
    vn.numba.compare_jax_and_py(f, args)
    vn.numba.compare_numba_and_py(f, args, native=False)


def test_high_primitives_of_jax_are_expanded():
    """JAX has such primitives from version 0.12 on."""

    def f(x):
        edges = jnp.sort(x)
        root = lax.custom_root(
            lambda y: y * y - x.sum(), 1.0, lambda f, y: y + 1, lambda g, y: y / g(1.0)
        )
        return {
            "searchsorted": jnp.searchsorted(edges, x),
            "nonzero": jnp.nonzero(x > 1, size=3),
            "unique": jnp.unique(x, size=5),
            "choice": jax.random.choice(jax.random.key(0), 6, (3,), p=x / x.sum()),
            "frexp": jnp.frexp(x),
            "root": root,
        }

    args = [np.array([3, 1, 2, 2, 5, 1], np.float32)]
    vn.numba.compare_jax_and_py(f, args)
    vn.numba.compare_numba_and_py(f, args, native=False)


def test_reductions_over_named_axes_agree_with_jax():
    of_row = lambda x: [lax.pmean(x, "i"), lax.pmax(x, "i"), lax.pmin(x, "i")]
    f = lambda x: jax.vmap(of_row, axis_name="i")(x)
    args = [np.arange(6, dtype=np.float32).reshape(3, 2)]
    vn.numba.compare_jax_and_py(f, args)
    vn.numba.compare_numba_and_py(f, args, native=False)


def test_reductions_over_no_axes_change_nothing():
    f = lambda x: [lax.reduce_sum(x, ()), lax.reduce_max(x + 1, ()), jnp.any(x > 1, axis=())]
    vn.numba.compare_numba_and_py(f, [np.arange(3, dtype=np.float32)], native=False)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_reduce_precision_agrees_with_jax(dtype):
    values = [0.0, -0.0, 1.0, 1.0625, 1.1875, -2.9, 6e4, 7e-6, -3e-7, 1e-3, np.inf, np.nan]
    f = lambda x: [lax.reduce_precision(x, *bits) for bits in ((5, 10), (5, 3), (4, 3), (8, 4))]
    args = [np.array(values, dtype)]
    vn.numba.compare_jax_and_py(f, args, rtol=0.0)
    vn.numba.compare_numba_and_py(f, args, native=False, rtol=0.0)
