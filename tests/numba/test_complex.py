"""Functions of complex numbers agree with JAX up to JAX's own error, also on branch cuts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import veneer as vn
from veneer.numba.maths import complex as complex_maths

#: By how much results may differ, of their absolute value: JAX's own are that far from the exact.
RTOL = {"complex64": 4e-6, "complex128": 4e-15}


def function(name):
    return getattr(lax, name, None) or getattr(jnp, name)


def every(x):
    return {name: function(name)(x) for name in complex_maths.FUNCTIONS}


def pairs(parts, dtype):
    return np.array([complex(x, y) for x in parts for y in parts], dtype)


def usual(dtype):
    """Return numbers of all sizes and angles, and numbers around 1, where logarithms are small."""
    random = np.random.default_rng(0)
    size = np.concatenate([10 ** random.uniform(-3, 1.3, 200), random.uniform(0.99, 1.01, 20)])
    return (size * np.exp(1j * random.uniform(-np.pi, np.pi, size.size))).astype(dtype)


@pytest.fixture(scope="module", params=["complex64", "complex128"])
def results(request):
    """Return numbers, and functions of the numbers by compiled code and by JAX."""
    dtype = request.param
    with jax.enable_x64(dtype == "complex128"):
        cuts = pairs([0.0, -0.0, 0.5, -0.5, 2.0, -2.0], dtype)
        endless = pairs([np.inf, -np.inf, 1.0, -1.0], dtype)
        x = np.concatenate([usual(dtype), cuts, endless])
        return x, vn.numba.compile(every, x)(x), jax.jit(every)(x), RTOL[dtype]


def parts(x):
    return np.stack([x.real, x.imag]) if np.iscomplexobj(x) else x[None]


def check(found, wanted, rtol):
    """Assert that finite numbers are close in absolute value, and that infinite parts are equal."""
    finite = np.isfinite(wanted)
    size = np.maximum(1e-30, np.abs(wanted[finite]))
    assert (np.abs(found[finite] - wanted[finite]) / size).max() <= rtol
    np.testing.assert_allclose(parts(found[~finite]), parts(wanted[~finite]), rtol)


#: What JAX computes itself less well: the inverses at 0, a power of an infinity, small sines.
UNLIKE = {"rsqrt", "exp2", "sinh"}


@pytest.mark.parametrize("name", sorted({*complex_maths.FUNCTIONS} - UNLIKE))
def test_results_agree_with_jax(results, name):
    _, compiled, expected, rtol = results
    assert compiled[name].dtype == expected[name].dtype
    check(compiled[name], np.asarray(expected[name]), rtol)


@pytest.mark.parametrize("name", sorted(UNLIKE))
def test_results_agree_with_numpy(results, name):
    x, compiled, _, rtol = results
    inside = np.isfinite(x) & (x != 0) & (np.abs(x) < 10)
    exact = {"rsqrt": lambda x: 1 / np.sqrt(x)}.get(name) or getattr(np, name)
    wanted = exact(x[inside].astype(np.clongdouble))
    assert (np.abs(compiled[name][inside] - wanted) / np.abs(wanted)).max() <= rtol


def test_powers_agree_with_jax():
    exponents = np.array([2.5, -1.5 + 0.5j, 1.5 - 0.5j, 0, 3, -1, 0.5j], np.complex64)
    x = np.append(usual("complex64"), np.array([0, 1, np.inf], np.complex64))[:, None]
    power = vn.numba.compile(lax.pow, x, exponents[None])
    check(power(x, exponents[None]), np.asarray(jax.jit(lax.pow)(x, exponents[None])), 2e-5)


@pytest.mark.parametrize("name", sorted(complex_maths.FUNCTIONS))
def test_references_agree_with_jax(name):
    x = usual("complex64")[::20]
    vn.numba.compare_numba_and_py(function(name), [x], native=False)
    vn.numba.compare_jax_and_py(function(name), [x])


def test_one_program_can_have_real_and_complex_functions():
    f = lambda z: [g(x) for g in (jnp.arctan, jnp.sqrt, jnp.sinh, jnp.abs) for x in (z, z.real)]
    vn.numba.compare_numba_and_py(f, [np.array([0.5 + 1j, 2], np.complex64)])


def test_gradients_of_complex_functions_agree_with_jax():
    loss = lambda z: jnp.abs(jnp.sum(jnp.exp(z) * jnp.sqrt(z)) / jnp.tanh(z[0]))
    z = usual("complex64")[:5]
    found, wanted = (f(z) for f in (vn.numba.compile(jax.grad(loss), z), jax.grad(loss)))
    np.testing.assert_allclose(found, wanted, rtol=2e-5)


def test_quotients_by_zero_and_of_infinities_agree_with_jax():
    """Numba's own division would raise and leave results uninitialized."""
    x = pairs([np.inf, -np.inf, np.nan, 0.0, -0.0, 1.0, -1.0], "complex64")
    z, w = (np.ascontiguousarray(v) for v in np.broadcast_arrays(x[:, None], x))
    f = lambda z, w: (z / w, jnp.where(w == 0, 0, 1 / w), w**-2)
    for found, wanted in zip(vn.numba.compile(f, z, w)(z, w), jax.jit(f)(z, w), strict=True):
        np.testing.assert_allclose(parts(found), parts(np.asarray(wanted)), 1e-6)
