"""What is known to divide an index, of which only the program that computes it is known."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import veneer as vn
from veneer._jax.known_values import find_divisor

N = 1000


def twice(i, _):
    """Which asks for the same index two times: 60 such, 2 ** 60 times if none is kept."""
    return i + i


#: Of an index `i` of which nothing is known, and what divides the result at least.
PROGRAMS = {
    "itself": (lambda i: i, 1),
    "a multiple": (lambda i: i * 64, 64),
    "a multiple of an odd number": (lambda i: i * 96, 32),
    "a multiple of a multiple": (lambda i: (i * 8) * 4, 32),
    "a sum of multiples": (lambda i: i * 64 + (i + 1) * 32, 32),
    "a multiple and more": (lambda i: i * 64 + 1, 1),
    "counted from the end": (lambda i: lax.select(i * 8 < 0, i * 8 + 64, i * 8), 8),
    "of another dtype": (lambda i: (i * 16).astype(jnp.int16), 16),
    "clamped": (lambda i: jnp.clip(i * 16, 0, 128), 1),  # jnp.clip is a jit
    "clamped by lax": (lambda i: lax.clamp(0, i * 16, 128), 16),
    "rounded down": (lambda i: i // 32 * 32, 32),
    "one of several": (lambda i: (jnp.arange(4) * 0 + i * 16).reshape(2, 2)[1, 0], 16),
    "a constant": (lambda i: jnp.int32(48), 48),
    "zero": (lambda i: i * 0, 0),
    "with itself, many times": (lambda i: functools.reduce(twice, range(60), i * 16), 16),
    "a float": (lambda i: i * 64.0, 1),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_of_a_traced_index(name):
    program, expected = PROGRAMS[name]
    found = []

    def traced(i):
        index = program(i)
        found.append(find_divisor(index))
        return index

    jax.make_jaxpr(traced)(3)
    assert found == [expected]
    results = np.asarray(jax.vmap(program)(jnp.arange(-N, N)))
    assert (results == 0 if expected == 0 else results % expected == 0).all()


def test_of_what_is_known():
    assert find_divisor(jnp.array([48, 96, 0])) == 48
    assert find_divisor(jnp.int32(0)) == 0


def test_what_overflows_is_divided_all_the_same():
    """By a power of two: 96 * i, which is 32 * 3 * i, is no multiple of 3 once it has."""
    f = lambda i: (i.astype(jnp.int8)) * jnp.int8(96)
    found = []
    jax.make_jaxpr(lambda i: found.append(find_divisor(f(i))))(3)
    assert found == [32]
    results = np.asarray(f(jnp.arange(100)))
    assert (results % 32 == 0).all()
    assert (results % 96 != 0).any()


@pytest.mark.parametrize("start", [0, 16, 48, 64, 1000, -16])
@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("qtype", ["int8", "int4", "int3"])
def test_slices_of_whole_tiles_stay_quantised_wherever_they_start(qtype, traced, start):
    """Out of bounds, JAX moves them in. Rows are in tiles; columns are packed."""
    w = jax.random.normal(jax.random.key(0), (64, 64))
    q = vn.quant.quantize(w, qtype, channelwise_axes=(1,), tiled_axes={0: 8})
    for axis in (0, 1):
        f = lambda w, i, axis=axis: lax.dynamic_slice_in_dim(w, i * 16, 16, axis)
        run = jax.jit(vn.implicit(f)) if traced else vn.implicit(f)
        out = run(q, start // 16)
        assert isinstance(out, vn.quant.QArray)
        np.testing.assert_array_equal(out.dequantize(), f(q.dequantize(), start // 16))


def test_slices_of_which_that_is_not_known_are_dense():
    q = vn.quant.quantize(jnp.ones((64, 64)), "int4", channelwise_axes=(1,), tiled_axes={0: 8})
    f = lambda w, i: lax.dynamic_slice_in_dim(w, i, 16)
    assert isinstance(jax.jit(vn.implicit(f))(q, 8), jax.Array)
    part = lambda w, i: lax.dynamic_slice_in_dim(w, i * 8, 12)  # of a tile and a half
    assert isinstance(jax.jit(vn.implicit(part))(q, 1), jax.Array)
