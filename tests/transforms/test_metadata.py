"""Loops and branches never lose or falsify what a value's metadata means."""

import re

import jax
import jax.numpy as jnp
import pytest
from array_types import quantized

import veneer as vn


class Metres(vn.ImplicitArray):
    """A length to some power. Its dense form is a bare number."""

    x: jax.Array  # [...]
    power: int = vn.static(default=1)

    def materialise(self):
        return self.x


@vn.register("mul")
def _(a: Metres, b: Metres, **params):
    return Metres(a.x * b.x, a.power + b.power)


@vn.register("add")
def _(a: Metres, b: Metres, **params):
    assert a.power == b.power
    return Metres(a.x + b.x, a.power)


LENGTH = Metres(jnp.full((2, 3), 2.0, jnp.float32))
FIRST = Metres(jnp.ones(3))

CHANGING = {
    "fori_loop": lambda m: jax.lax.fori_loop(0, 2, lambda i, c: c * c, m),
    "while_loop": lambda m: jax.lax.while_loop(lambda c: True, lambda c: c * c, m),
    "scan carry": lambda m: jax.lax.scan(lambda c, _: (c * m, None), m, None, length=3)[0],
    "cond": lambda m: jax.lax.cond(True, lambda m: m * m, lambda m: m, m),
    "switch": lambda m: jax.lax.switch(1, [lambda m: m, lambda m: m * m, lambda m: m], m),
}


@pytest.mark.parametrize("program", CHANGING.values(), ids=CHANGING)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_metadata_that_changes_is_refused_by_name(program, wrap):
    with pytest.raises(TypeError, match=r"Metres.*power=.*Metres.*metadata differs") as error:
        vn.implicit(wrap(program))(LENGTH)
    assert re.match(r"carry \d of (scan|while)|output 0 of cond", str(error.value))


KEEPING = {
    "fori_loop": (lambda m, _: jax.lax.fori_loop(0, 2, lambda i, c: c + m, m), 1),
    "scan": (lambda m, first: jax.lax.scan(lambda c, x: (c + x, c * x), first, m)[1], 2),
    "cond": (lambda m, _: jax.lax.cond(True, lambda m: m * m, lambda m: (m + m) * m, m), 2),
    "map": (lambda m, _: jax.lax.map(lambda m: m * m, m), 2),
}


@pytest.mark.parametrize(("program", "power"), KEEPING.values(), ids=KEEPING)
def test_metadata_that_agrees_is_kept(program, power):
    out = vn.implicit(program)(LENGTH, FIRST)
    assert (type(out), out.power) == (Metres, power)


ZERO = jnp.zeros((2, 3))

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


class Opaque(vn.ImplicitArray):
    """It says nothing of an array, and refuses to be dense."""

    x: jax.Array  # [...]

    def aval(self):
        return jax.typeof(self.x)

    def materialise(self):
        raise RuntimeError("refused")


@vn.register("add")
def _(a: Opaque | vn.ArrayLike, b: Opaque | vn.ArrayLike, **params):
    return Opaque(jnp.add(*[v.x if isinstance(v, Opaque) else v for v in (a, b)]))


def test_a_type_without_metadata_takes_dense_arrays_in():
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
def test_an_array_that_is_not_zero_takes_no_unit(program):
    assert isinstance(vn.implicit(program)(LENGTH), jax.Array)

    class Strict(Metres):
        def materialise(self):
            raise RuntimeError("a number is no length")

        def aval(self):
            return jax.typeof(self.x)

    with pytest.raises(TypeError, match=r"\d of .* is .*Strict.*, and Strict refuses to be dense"):
        vn.implicit(program)(Strict(LENGTH.x))


class Normed(vn.ImplicitArray):
    """Rows that depend on each other."""

    x: jax.Array  # [...]
    batch_transparent = False

    def materialise(self):
        return self.x / jnp.linalg.norm(self.x)


@pytest.mark.parametrize(
    "program",
    [
        lambda m: jax.lax.map(lambda row: 2 * row, m),
        lambda m: jax.lax.scan(lambda c, _: (c, m), 0, None, length=2)[1],
    ],
    ids=["slices", "stacks"],
)
def test_a_type_that_is_not_batch_transparent_is_made_dense(program):
    value = Normed(jnp.arange(1.0, 7.0).reshape(2, 3))
    assert jnp.allclose(vn.implicit(program)(value), program(vn.materialise(value)))


def test_how_a_value_is_stored_may_change():
    w = quantized("int4", 3)(jax.random.key(0))
    loop = lambda w: jax.lax.fori_loop(0, 3, lambda i, w: w.T, w)  # packed along the other axis
    assert jnp.array_equal(vn.implicit(loop)(w), vn.materialise(w).T)
