"""Compiled programs draw the same random bits as jax.random."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays

import veneer as vn
from veneer.numba.testing import with_numpy_rules


def draws(key, raw, number):
    first, second = jax.random.split(key)
    return {
        "bits": [jax.random.bits(second, (3,), f"uint{n}") for n in (8, 16, 32)],
        "normal": jax.random.normal(first, (3, 2)),
        "integers": jax.random.randint(first, (4,), 0, 10),
        "many keys": jax.random.split(raw, (2, 3)),
        "folded": [jax.random.fold_in(key, number), jax.random.fold_in(raw, 3)],
        "new keys": [jax.random.key(number), jax.random.PRNGKey(number)],
        "batched": jax.vmap(lambda k: jax.random.uniform(k, (2,)))(jax.random.split(key, 3)),
        "moved keys": jnp.stack([first, second])[::-1],
        "gumbel": jax.random.gumbel(raw, (2,)),
    }


ARGS = [arrays.key(7), arrays.array([0, 3], np.uint32), np.int32(-5)]


def test_references_draw_the_numbers_of_jax():
    vn.numba.compare_jax_and_py(draws, ARGS)


def test_compiled_programs_draw_the_numbers_of_jax():
    vn.numba.compare_numba_and_py(draws, ARGS)


@pytest.mark.parametrize("seed", [-3, 2**40 + 1])
def test_64_bit_numbers_equal_jax(seed):
    def f(key, seed):
        return jax.random.bits(key, (3,), "uint64"), jax.random.normal(key), jax.random.key(seed)

    with jax.enable_x64(True):
        vn.numba.compare_jax_and_py(f, [jax.random.key(1), np.int64(seed)])
        vn.numba.compare_numba_and_py(f, [jax.random.key(1), np.int64(seed)], native=False)


def test_a_key_can_be_captured():
    key = jax.random.key(5)
    f = lambda x: jax.random.normal(key, (2,)) + x
    vn.numba.compare_numba_and_py(f, [np.float32(1)], native=False)


def test_key_results_can_be_arguments():
    step = vn.numba.compile(lambda key: jax.random.split(key)[0], jax.random.key(0))
    key, expected = jax.random.key(0), jax.random.key(0)
    for _ in range(2):
        key, expected = step(key), jax.random.split(expected)[0]
    np.testing.assert_array_equal(key, jax.random.key_data(expected))


def test_other_key_algorithms_raise():
    f = lambda raw: jax.random.bits(jax.random.wrap_key_data(raw, impl="rbg"))
    with pytest.raises(NotImplementedError, match="no arrays of dtype key<rbg>"):
        vn.numba.compile(f, np.zeros(4, np.uint32))


def test_the_unpartitionable_layout_raises():
    with (
        jax.threefry_partitionable(False),
        pytest.raises(NotImplementedError, match="False is not"),
    ):
        vn.numba.compile(lambda key: jax.random.bits(key), jax.random.key(0))


def test_gamma_samples_equal_jax():
    f = lambda key: [jax.random.gamma(key, 2.0, (2,)), jax.random.beta(key, 0.5, 3.0)]
    vn.numba.compare_jax_and_py(f, ARGS[:1])
    vn.numba.compare_numba_and_py(f, ARGS[:1], native=False)


def test_keys_out_of_bounds_are_filled_as_in_jax():
    keys = jax.random.split(jax.random.key(3), 3)
    f = lambda keys: keys.at[jnp.array([5, 1])].get(mode="fill")
    expected = jax.random.key_data(f(keys))
    np.testing.assert_array_equal(vn.numba.compile(f, keys)(keys), expected)
    np.testing.assert_array_equal(with_numpy_rules(f)(keys), expected)
