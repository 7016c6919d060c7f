"""Reductions by functions of scalars."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import veneer as vn

X = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)


def both(f, args, **options):
    vn.numba.compare_jax_and_py(f, args, **options)
    vn.numba.compare_numba_and_py(f, args, native=False, **options)


@pytest.mark.parametrize("axes", [(0,), (2,), (0, 2), (0, 1, 2)], ids=str)
def test_one_array_can_be_reduced_by_a_function(axes):
    both(lambda x: lax.reduce(x, -np.inf, jnp.logaddexp, axes), [X], atol=1e-5)


def furthest(x, places):
    """Return the number that is furthest from 0, and its index."""

    def further(old, new):
        is_new = jnp.abs(new[0]) > jnp.abs(old[0])
        return tuple(jnp.where(is_new, n, o) for o, n in zip(old, new, strict=True))

    return lax.reduce((x, places), (jnp.zeros((), x.dtype), jnp.int32(-1)), further, (1,))


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_arrays_of_several_dtypes_can_be_reduced_together(dtype):
    places = np.broadcast_to(np.arange(5, dtype=np.int32)[:, None], X.shape)
    both(furthest, [X.astype(dtype), places])


def test_a_reduction_of_no_entries_returns_the_initial_value():
    both(lambda x: lax.reduce(x[:, :0], 2.0, lambda a, b: a * b + 1, (1,)), [X])
    both(lambda x: lax.reduce(x[:0], 2.0, lambda a, b: a * b + 1, (1,)), [X])


def test_native_code_agrees_with_the_references():
    places = np.broadcast_to(np.arange(5, dtype=np.int32)[:, None], X.shape)
    found, wanted = vn.numba.compile(furthest, X, places)(X, places), jax.jit(furthest)(X, places)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(x, y)


def test_a_function_with_a_loop_raises():
    powers = lambda a, b: lax.fori_loop(0, 3, lambda i, x: x * b, a)
    with pytest.raises(
        NotImplementedError, match=r"'reduce'.*jaxpr: it may not have '(scan|while)'"
    ):
        vn.numba.compile(lambda x: lax.reduce(x, 1.0, powers, (0,)), X)


def of_many_steps(v):
    """Reduce by primitives that elsewhere compute arrays before a loop reads them."""
    return jax.scipy.special.digamma(jnp.exp(v / 9) + 1) + lax.reduce_precision(jnp.tanh(v), 8, 9)


def test_functions_of_many_steps_stay_in_the_loop():
    add = lambda a, b: of_many_steps(a) + b
    f = lambda x: (
        lax.reduce(x, np.float32(1), add, (0,)),
        lax.reduce_window(x, np.float32(0), add, (2,), (1,), "VALID"),
        x.at[jnp.array([1, 3])].apply(of_many_steps),
    )
    x = np.arange(1, 6, dtype=np.float32)
    both(f, [x])
    for found, wanted in zip(vn.numba.compile(f, x)(x), jax.jit(f)(x), strict=True):
        np.testing.assert_allclose(found, wanted, 1e-5)


def test_a_function_that_updates_an_array_raises():
    f = lambda x: x.at[0].apply(lambda v: jnp.zeros(3).at[1].set(v)[1])
    with pytest.raises(NotImplementedError, match=r"'scatter'.*jaxpr: it may not have 'scatter'"):
        vn.numba.compile(f, X[0, 0])


def test_a_reduction_over_no_axes_changes_nothing():
    both(lambda x: lax.reduce(x, np.float32(2), lambda a, b: a * b + 1, ()), [X])
