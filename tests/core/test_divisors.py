"""Divisors of traced indices, and the slices that stay quantized because of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import veneer as vn
from veneer._jax.tracing import find_divisor

N = 1000


def twice(i, _):
    """Use the same index twice. Without a cache, 60 such steps would search it 2 ** 60 times."""
    return i + i


#: Programs of an unknown index `i`, and the divisor that is found.
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
def test_traced_indices_have_known_divisors(name):
    program, expected = PROGRAMS[name]
    divisors = []

    def traced(i):
        index = program(i)
        divisors.append(find_divisor(index))
        return index

    jax.make_jaxpr(traced)(3)
    assert divisors == [expected]
    results = np.asarray(jax.vmap(program)(jnp.arange(-N, N)))
    assert (results == 0 if expected == 0 else results % expected == 0).all()


def test_concrete_indices_have_divisors():
    assert find_divisor(jnp.array([48, 96, 0])) == 48
    assert find_divisor(jnp.int32(0)) == 0


def test_divisors_hold_after_an_overflow():
    """96 * i is always a multiple of 32, but after an overflow not of 3."""
    f = lambda i: (i.astype(jnp.int8)) * jnp.int8(96)
    divisors = []
    jax.make_jaxpr(lambda i: divisors.append(find_divisor(f(i))))(3)
    assert divisors == [32]
    results = np.asarray(f(jnp.arange(100)))
    assert (results % 32 == 0).all()
    assert (results % 96 != 0).any()


@pytest.mark.parametrize("start", [0, 16, 48, 64, 1000, -16])
@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("qtype", ["int8", "int4", "int3"])
def test_slices_of_whole_tiles_stay_quantized(qtype, traced, start):
    """JAX moves starts that are out of bounds. Rows are tiled, and columns are packed."""
    w = jax.random.normal(jax.random.key(0), (64, 64))
    q = vn.quant.quantize(w, qtype, channelwise_axes=(1,), tiled_axes={0: 8})
    for axis in (0, 1):
        f = lambda w, i, axis=axis: lax.dynamic_slice_in_dim(w, i * 16, 16, axis)
        run = jax.jit(vn.implicit(f)) if traced else vn.implicit(f)
        out = run(q, start // 16)
        assert isinstance(out, vn.quant.QArray)
        np.testing.assert_array_equal(out.dequantize(), f(q.dequantize(), start // 16))


def test_slices_with_unknown_divisors_are_dense():
    q = vn.quant.quantize(jnp.ones((64, 64)), "int4", channelwise_axes=(1,), tiled_axes={0: 8})
    f = lambda w, i: lax.dynamic_slice_in_dim(w, i, 16)
    assert isinstance(jax.jit(vn.implicit(f))(q, 8), jax.Array)
    part = lambda w, i: lax.dynamic_slice_in_dim(w, i * 8, 12)  # a tile and a half
    assert isinstance(jax.jit(vn.implicit(part))(q, 1), jax.Array)
