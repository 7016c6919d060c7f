"""Sorting in JAX's order, with NaN and signed zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import veneer as vn

SPECIAL = [3, np.nan, -0.0, 0.0, -np.inf, np.inf, 1, -np.nan, 2, -1, -0.0, 5, 5, 1, 0, -3]
PLACES = np.arange(16)
X = np.round(np.random.default_rng(0).normal(size=(3, 20, 4)), 1).astype(np.float32)


def both(f, args, native=False):
    vn.numba.compare_jax_and_py(f, args, rtol=0.0, atol=0.0)
    vn.numba.compare_numba_and_py(f, args, native=native, rtol=0.0, atol=0.0)


def sorts(x, i):
    """Sort several operands, which shows the order of equal keys."""
    return {
        "ascending": lax.sort((x, i), num_keys=1),
        "descending": [jnp.sort(x, descending=True), jnp.argsort(x, descending=True)],
        "two keys": lax.sort((x > 0, x, i), num_keys=2),
        "complex": lax.sort((lax.complex(x, x * 0 + i % 3), i), num_keys=1),
        "integers": jnp.sort(i.astype(jnp.int8) * 9 - 60),
        "top": lax.top_k(x, 16),
        "top of integers": lax.top_k(i % 3, 6),
        "about": [lax.approx_max_k(x[8:], 3), lax.approx_min_k(x[8:], 3)],
        "median": jnp.median(x[8:]),
    }


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_special_numbers_are_ordered_as_in_jax(dtype):
    with jax.enable_x64(dtype == "float64"):
        integer = "int64" if dtype == "float64" else "int32"
        both(sorts, [np.array(SPECIAL, dtype), PLACES.astype(integer)])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_ordered_as_in_jax(dtype):
    x = jnp.asarray(SPECIAL, dtype)
    both(lambda x: [lax.sort((x, lax.iota("int32", 16)), num_keys=1), lax.top_k(x, 9)], [x])


def test_entries_made_equal_by_rounding_stay_in_order():
    """Tested for `sort` only, because XLA's top_k takes products before they are rounded."""
    x = jnp.asarray(1 + np.arange(128)[::-1] / 128, "bfloat16")
    f = lambda x, y: lax.sort((x * y, lax.iota("int32", 128)), num_keys=1)
    both(f, [x, jnp.asarray(1.3, "bfloat16")])


def test_any_axis_can_be_sorted():
    def f(x):
        found = [function(x, axis=a) for a in range(3) for function in (jnp.sort, jnp.argsort)]
        return [found, lax.top_k(x, 2)]

    both(f, [X])


def test_long_arrays_are_sorted_by_merging():
    x = np.round(np.random.default_rng(1).normal(size=100), 1).astype(np.float32)
    f = lambda x: [lax.sort((x.astype("int32"), x), num_keys=2), lax.top_k(x, 7)]
    both(f, [x], native=True)


def test_an_empty_array_can_be_sorted():
    both(lambda x: [jnp.sort(x), lax.top_k(x[None], 0)], [np.zeros(0, np.float32)])


def test_approx_top_k_without_aggregation_raises():
    f = lambda x: lax.approx_max_k(x, 2, aggregate_to_topk=False)
    with pytest.raises(NotImplementedError, match="aggregate_to_topk"):
        vn.numba.compile(f, np.zeros(4, np.float32))


def test_total_order_comparisons_agree_with_jax():
    x, y = (np.array(z, np.float32) for z in np.meshgrid(SPECIAL[:8], SPECIAL[:8]))
    primitives = (lax.lt_to_p, lax.le_to_p, lax.eq_to_p)
    both(lambda x, y: [compare.bind(x, y) for compare in primitives], [x, y])
