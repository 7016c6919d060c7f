"""Loops and branches never lose or change the meaning of metadata."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arrays
from support.array_types import Metres, Tagged, quantized
from support.probes import Opaque

import veneer as vn

LENGTH = Metres(arrays.full((2, 3), 2.0, jnp.float32))
FIRST = Metres(arrays.ones(3))

KEEPING = {
    "fori_loop": (lambda m, _: jax.lax.fori_loop(0, 2, lambda i, c: c + m, m), 1),
    "scan": (lambda m, first: jax.lax.scan(lambda c, x: (c + x, c * x), first, m)[1], 2),
    "cond": (lambda m, _: jax.lax.cond(True, lambda m: m * m, lambda m: (m + m) * m, m), 2),
    "map": (lambda m, _: jax.lax.map(lambda m: m * m, m), 2),
}


@pytest.mark.parametrize(("program", "power"), KEEPING.values(), ids=KEEPING)
def test_equal_metadata_is_kept(program, power):
    out = vn.implicit(program)(LENGTH, FIRST)
    assert (type(out), out.power) == (Metres, power)


ZERO = arrays.zeros((2, 3))

JOINED_BY_ZEROS = {
    "fori_loop": lambda m: jax.lax.fori_loop(0, 2, lambda i, c: m + m, ZERO),
    "scan": lambda m: jax.lax.scan(lambda c, x: (x, None), jnp.zeros(3), m)[0],
    "while_loop": lambda m: jax.lax.while_loop(lambda c: True, lambda c: m * m, ZERO),
    "cond": lambda m: jax.lax.cond(True, lambda m: m, lambda m: jnp.zeros((2, 3)), m),
    "switch": lambda m: jax.lax.switch(1, [jnp.zeros_like, lambda m: m * m, jnp.zeros_like], m),
}


@pytest.mark.parametrize("name", JOINED_BY_ZEROS)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_zero_is_zero_in_any_unit(name, wrap):
    out = jax.eval_shape(vn.implicit(wrap(JOINED_BY_ZEROS[name])), LENGTH)
    assert type(out) is Metres


def test_a_type_without_metadata_accepts_dense_arrays():
    loop = lambda x, y: jax.lax.fori_loop(0, 3, lambda i, c: c + y, x)
    out = vn.implicit(loop)(jnp.ones(3), Opaque(jnp.ones(3)))
    assert out.x.tolist() == [4, 4, 4]


@pytest.mark.parametrize(
    "program",
    [
        lambda m: jax.lax.cond(True, lambda m: m, lambda m: jnp.ones((2, 3)), m),
        lambda m: jax.lax.fori_loop(0, 2, lambda i, c: m, jnp.ones((2, 3))),
    ],
    ids=["cond", "fori_loop"],
)
def test_a_nonzero_array_gets_no_unit(program):
    assert isinstance(vn.implicit(program)(LENGTH), jax.Array)

    class Strict(Metres):
        def materialise(self):
            raise RuntimeError("a number is no length")

        def aval(self):
            return jax.typeof(self.x)

    with pytest.raises(TypeError, match=r"\d of .* is .*Strict.*, and Strict refuses to be dense"):
        vn.implicit(program)(Strict(LENGTH.x))


def test_a_loop_whose_body_loses_a_label_raises():
    loop = lambda t: jax.lax.fori_loop(0, 2, lambda i, t: jnp.exp(t), t)
    with pytest.raises(RuntimeError, match="refuses to lose its label"):
        vn.implicit(loop)(Tagged(jnp.ones(3), "m"))


def test_the_packing_of_a_carry_may_change():
    w = quantized("int4", 3)(jax.random.key(0))
    loop = lambda w: jax.lax.fori_loop(0, 3, lambda i, w: w.T, w)  # packed along the other axis
    assert jnp.array_equal(vn.implicit(loop)(w), vn.materialise(w).T)


def test_a_zero_argument_is_recognized_only_eagerly():
    loop = lambda z, m: jax.lax.fori_loop(0, 2, lambda i, c: m, z)
    kinds = [
        type(f(z, LENGTH))
        for f in (vn.implicit(loop), jax.jit(vn.implicit(loop)))
        for z in (ZERO, ZERO + 1)
    ]
    assert [kind is Metres for kind in kinds] == [True, False, False, False]


def of_ones(**methods):
    """Return ones of a new type with the given methods. The default `aval` describes its array."""
    methods.setdefault("aval", lambda self: jax.typeof(self.x))
    return type("Odd", (Opaque,), methods)(arrays.ones(3))


def materialise_concretely(self):
    return jnp.asarray(2 * np.asarray(self.x))


def refuse(self):
    raise RuntimeError("stays in the log domain")


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (of_ones(materialise=materialise_concretely), jax.errors.TracerArrayConversionError),
        (of_ones(materialise=lambda self: self.y), AttributeError),
        (of_ones(materialise=refuse, is_label=False), RuntimeError),
    ],
    ids=["concrete leaves", "a typo", "the leaf is something else"],
)
def test_a_dense_branch_of_unknown_type_raises(value, error):
    choose = lambda p, d: jax.lax.cond(p, lambda d: d, lambda d: jnp.full(3, 5.0), d)
    with pytest.raises(error):
        vn.implicit(choose)(jnp.array(False), value)
