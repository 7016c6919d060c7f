"""Different types in one place: in the carry of a loop, in branches, and in a batch."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support import arrays
from support.array_types import Lora, Metres, Normed, assert_close, lora, lora_of_int8
from support.probes import Quantity, UnitError, unit

import veneer as vn

KEY = arrays.key(7)
SHAPE = (4, 4)
W = lora(KEY, SHAPE)
X = arrays.normal(*SHAPE, seed=8)


def check(f, *operands):
    """`f` on values agrees with `f` on dense arrays, eagerly and under jit; gives the values."""
    expected = f(*vn.materialise(operands))
    out = vn.implicit(f)(*operands)
    assert_close(out, expected)
    assert_close(jax.jit(vn.implicit(jax.jit(f)))(*operands), expected)
    return out


# A carry that changes type goes to a fixed point.


@pytest.mark.parametrize("make", [lora, lora_of_int8])
def test_carries_are_materialized_one_after_another(make):
    """The first is dense after one turn, the second after two: the types settle on the third."""
    ws = [make(key, SHAPE) for key in jax.random.split(KEY, 3)]
    body = lambda c: (c[0] + 1.0, c[0], c[1])
    out = check(lambda *c: lax.fori_loop(0, 4, lambda _, c: body(c), c), *ws)
    assert not any(isinstance(x, vn.ImplicitArray) for x in out)


def test_a_carry_that_keeps_its_type_stays_implicit():
    body = lambda c: (c[0], jnp.tanh(c[1] @ c[0]), c[2] * 2.0)
    loop = lambda *c: lax.scan(lambda c, _: (body(c), c[0]), c, None, length=3)
    (kept, dense, changed), stacked = check(loop, W, X, W)
    assert type(kept) is type(stacked) is Lora
    assert not isinstance(dense, vn.ImplicitArray)
    assert not isinstance(changed, vn.ImplicitArray)


def test_nested_loops_agree_with_dense():
    inner = lambda w: lax.while_loop(lambda s: s[1] < 2, lambda s: (s[0] * 2.0, s[1] + 1), (w, 0))[
        0
    ]
    check(lambda w: lax.fori_loop(0, 2, lambda _, w: inner(w), w), W)


def test_a_loop_without_iterations_returns_the_same_type():
    loop = lambda w, n: lax.fori_loop(0, n, lambda _, w: w * 2.0, w)
    for n in (0, 1):
        assert not isinstance(check(loop, W, jnp.array(n)), vn.ImplicitArray)


# Branches meet at the dense form.

BRANCHES = {
    "cond": lambda i, w: lax.cond(i == 0, lambda w: w, lambda w: w * 2.0, w),
    "switch": lambda i, w: lax.switch(i, [lambda w: w, lambda w: w.T, lambda w: w * 2.0], w),
    "other types": lambda i, w: lax.cond(i == 0, lambda w: w[0], lambda w: w[1], (w, w * 2.0)),
    "cond in cond": lambda i, w: lax.cond(
        i > 0, lambda w: lax.cond(i > 1, lambda w: w, lambda w: w.T, w), lambda w: w, w
    ),
    "batch of predicates": lambda i, w: jax.vmap(
        lambda i: lax.cond(i == 0, lambda w: w, lambda w: w * 2.0, w)
    )(jnp.array([0, 1])),
}


@pytest.mark.parametrize("program", BRANCHES.values(), ids=BRANCHES)
@pytest.mark.parametrize("index", range(3))
def test_branches_of_an_implicit_and_a_dense_array(program, index):
    assert not isinstance(check(program, jnp.array(index), W), vn.ImplicitArray)


def test_an_operand_materialized_for_a_branch_is_reported():
    report = vn.explain(lambda w: lax.cond(True, lambda w: w, lambda w: X, w))(W)
    assert [(e.primitive, e.nbytes) for e in report.materialised] == [("cond", X.nbytes)]


# Metadata that differs raises an error that names the slot and both values.

METRES = Quantity(X, unit(m=1))

DIFFERING = {
    "second carry of scan": (
        r"carry 1 of scan",
        lambda q: lax.scan(lambda c, _: ((c[0] + 1, c[1] * q), None), (0, q), None, length=2),
    ),
    "third carry of while": (
        r"carry 2 of while",
        lambda q: lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, q, c[2] * q), (0, q, q)),
    ),
    "second output of cond": (
        r"output 1 of cond",
        lambda q: lax.cond(True, lambda q: (q, q * q), lambda q: (q + q, q + q), q),
    ),
    "output of switch": (
        r"output 0 of cond",
        lambda q: lax.switch(0, [lambda q: q, lambda q: q, lambda q: q * q], q),
    ),
    "carry of fori": (
        r"carry \d of (while|scan)",
        lambda q: lax.fori_loop(0, 2, lambda i, c: c * q, q),
    ),
}


# Neither type is materialized, because a plain number would lose the unit.
LENGTHS = {
    "refuses to be dense": (METRES, r"Quantity\(x=f32\[4,4\], unit=\(\('m', {}.0\),\)\)"),
    "could be dense": (Metres(X), r"Metres\(x=f32\[4,4\], power={}\)"),
}


@pytest.mark.parametrize(("length", "name"), LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(("slot", "program"), DIFFERING.values(), ids=DIFFERING)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_errors_name_the_carry_and_both_types(wrap, slot, program, length, name):
    one, other = name.format(1), name.format(2)
    sides = rf"{slot} is ({one}.*{other}|{other}.*{one}).*metadata differs"
    with pytest.raises(TypeError, match=sides):
        vn.implicit(wrap(program))(length)


def test_a_different_unit_raises():
    loop = lambda q: lax.fori_loop(0, 2, lambda i, c: c + q, jnp.ones(SHAPE))
    with pytest.raises((TypeError, UnitError), match=r"units differ|refuses to be dense"):
        vn.implicit(loop)(METRES)


# A type whose rows depend on each other is never cut or stacked leaf by leaf.


class Accumulated(vn.ImplicitArray):
    x: jax.Array  # [n, ...]
    batch_transparent = False

    def materialise(self):
        return jnp.cumsum(self.x, axis=0)


DEPENDENT = {
    "normed": Normed(X),
    "accumulated": Accumulated(X),
    "lora of accumulated": Lora(Accumulated(X), W.a, W.b),
}
CUTTING = {
    "scan, xs": lambda w: lax.scan(lambda c, row: (c + row, row * c), w[0], w),
    "scan, ys": lambda w: lax.scan(lambda c, _: (c, w), 0, None, length=3)[1],
    "scan, ys of a carry": lambda w: lax.scan(lambda c, _: (c, c), w, None, length=3),
    "map": lambda w: lax.map(lambda row: row / row.sum(), w),
    "vmap": lambda w: jax.vmap(lambda row: row / row.sum())(w),
    "vmap of columns": lambda w: jax.vmap(lambda column: column / column.sum(), 1)(w),
    "vmap of a scan": lambda w: jax.vmap(
        lambda row: lax.scan(lambda c, x: (c + x, c * x), 0.0, row)
    )(w),
    "vmap of cond": lambda w: jax.vmap(
        lambda p, row: lax.cond(p, lambda r: r, lambda r: r * 2, row)
    )(jnp.array([True, False, True, False]), w),
    "fori, indexed": lambda w: lax.fori_loop(0, 4, lambda i, c: c + w[i], jnp.zeros(4)),
    "associative_scan": lambda w: lax.associative_scan(jnp.add, w),
    "stack": lambda w: jnp.stack([w, w]).sum(1),
    "checkpoint": lambda w: jax.vmap(jax.checkpoint(jnp.sin))(w),
    "custom_jvp": lambda w: jax.vmap(jax.nn.relu)(w),
    "remat of map": lambda w: jax.checkpoint(lambda w: lax.map(jnp.sum, w))(w),
    "out_axes": lambda w: jax.vmap(lambda i: w * i, out_axes=1)(jnp.arange(3.0)),
    "constant of vmap": lambda w: jax.vmap(lambda i: w)(jnp.arange(3.0)),
}


@pytest.mark.parametrize("value", DEPENDENT.values(), ids=DEPENDENT)
@pytest.mark.parametrize("program", CUTTING.values(), ids=CUTTING)
def test_carries_that_exchange_values_agree_with_dense(program, value):
    check(program, value)
