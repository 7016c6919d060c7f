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


def test_how_a_value_is_stored_may_change():
    w = quantized("int4", 3)(jax.random.key(0))
    loop = lambda w: jax.lax.fori_loop(0, 3, lambda i, w: w.T, w)  # packed along the other axis
    assert jnp.array_equal(vn.implicit(loop)(w), vn.materialise(w).T)
