"""Cumulative reductions in compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import veneer as vn

NAMES = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
X = np.random.default_rng(0).normal(size=(3, 5, 4)).astype(np.float32)


def both(f, args, **options):
    vn.numba.compare_jax_and_py(f, args, **options)
    vn.numba.compare_numba_and_py(f, args, native=False, **options)


@pytest.mark.parametrize("axis", range(3))
def test_any_axis_can_be_accumulated_in_both_directions(axis):
    def f(x):
        return {
            (name, reverse): getattr(lax, name)(x, axis=axis, reverse=reverse)
            for name in NAMES
            for reverse in (False, True)
        }

    both(f, [X])


def test_infinities_and_nan_propagate_as_in_jax():
    rows = [[1, -np.inf, 2, np.nan, 3], [-np.inf, -np.inf, np.inf, 2, np.inf], [0.0, -0.0, 1, 2, 3]]
    names = [name for name in NAMES if name != "cumprod"]
    both(lambda x: [getattr(lax, n)(x, axis=a) for n in names for a in (0, 1)], [np.float32(rows)])


def test_integer_totals_wrap():
    both(lambda x: [getattr(lax, n)(x) for n in NAMES[:4]], [np.array([100, 100, -7], np.int8)])


def test_totals_of_bfloat16_are_float32():
    many = jnp.full(600, 1, "bfloat16")  # bfloat16 cannot count beyond 256
    total = vn.numba.compare_numba_and_py(lax.cumsum, [many], native=False)
    assert float(total[-1]) == 600


def test_complex_numbers_can_be_accumulated():
    both(lambda x: [lax.cumsum(x), lax.cumprod(x)], [np.complex64([1 + 1j, 2 - 1j, 1j])])


def test_native_code_agrees_with_the_references():
    def f(x):
        return [lax.cumsum(x, 0), lax.cumsum(x, 1), lax.cummax(x, 1), lax.cumlogsumexp(x, 0)]

    vn.numba.compare_numba_and_py(f, [X[0]])


def test_no_and_single_entries_can_be_accumulated():
    both(lambda x, y: [lax.cumsum(x), lax.cumlogsumexp(y)], [np.ones((0, 2)), np.ones((1, 2))])


def test_a_gradient_of_a_cumulative_sum_agrees_with_jax():
    vn.numba.compare_numba_and_py(
        jax.grad(lambda x: (jnp.cumsum(x, 1) * x).sum()), [X], native=False
    )
