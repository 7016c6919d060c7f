"""Loops and branches: materialization and its reports, carried types, and compilation.

matrix/test_control_flow.py tests their results, and test_meeting.py different types in them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import arrays
from support.array_types import MAKERS, Lora, assert_close
from support.policies import without_rule

import veneer as vn

X = arrays.array(np.linspace(-1.0, 1.0, 18).reshape(3, 6))
KEY = arrays.key(4)

pytestmark = pytest.mark.parametrize("name", MAKERS)


layer = lambda x, w: jnp.tanh(x @ w)
take = lambda x, w: (layer(x, w), None)

# Programs of x [3, 6], a value [6, 6] and a stack of values [2, 6, 6].
PROGRAMS = {
    "scan": lambda x, w, ws: lax.scan(take, x, ws),
    "scan, reverse": lambda x, w, ws: lax.scan(take, x, ws, reverse=True),
    "scan, unroll": lambda x, w, ws: lax.scan(take, x, ws, unroll=2),
    "scan, length 0": lambda x, w, ws: lax.scan(lambda x, _: take(x, w), x, None, length=0),
    "scan, ys": lambda x, w, ws: lax.scan(lambda x, _: (x @ w, w), x, None, length=3),
    "scan, carry": lambda x, w, ws: lax.scan(
        lambda c, _: ((layer(*c), c[1]), None), (x, w), None, length=2
    ),
    "while": lambda x, w, ws: lax.while_loop(
        lambda c: c[1] < 3, lambda c: (layer(c[0], w), c[1] + 1), (x, 0)
    ),
    "while, in its condition": lambda x, w, ws: lax.while_loop(
        lambda x: jnp.abs(x @ w).sum() < 50, lambda x: x * 2, x
    ),
    "cond": lambda x, w, ws: lax.cond(x[0, 0] > 0, layer, jnp.matmul, x, w),
    "cond, a value that passes": lambda x, w, ws: lax.cond(
        x[0, 0] > 0, lambda w: w, lambda w: w, w
    ),
    "map": lambda x, w, ws: lax.map(lambda w: x @ w, ws),
    "loop in a loop": lambda x, w, ws: lax.scan(
        lambda x, w: (lax.fori_loop(0, 2, lambda i, x: layer(x, w), x), None), x, ws
    ),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_operation_in_loops_and_branches_has_a_rule(program, name):
    w, ws = MAKERS[name](KEY), MAKERS[name](KEY, (2, 6, 6))
    assert without_rule(vn.explain(PROGRAMS[program])(X, w, ws)) == []


@pytest.mark.parametrize("options", [{"reverse": True}, {"unroll": 2}], ids=str)
def test_options_of_scan_are_kept(options, name):
    f = lambda x, ws: lax.scan(take, x, ws, **options)
    equations = jax.make_jaxpr(vn.implicit(f))(X, MAKERS[name](KEY, (2, 6, 6))).eqns
    (scan,) = [e for e in equations if e.primitive.name == "scan"]
    assert options.items() <= scan.params.items()


# In the matrix, no condition of a loop uses the value.
def test_a_condition_that_uses_a_value(name):
    w = MAKERS[name](KEY)
    f = lambda x, w: PROGRAMS["while, in its condition"](x, w, None)
    assert_close(vn.implicit(f)(X, w), f(X, vn.materialise(w)))


def test_vmap_of_jvp_of_cond_agrees_with_dense(name):
    w = MAKERS[name](KEY)
    f = lambda p, x, w: lax.cond(p, layer, jnp.matmul, x, w)

    def pushed(f):
        by_x = lambda p, x, w: jax.jvp(lambda x: f(p, x, w), (x,), (x + 1,))
        return jax.vmap(by_x, (0, 0, None))

    predicates = jnp.array([True, False, True])
    expected = pushed(f)(predicates, X, vn.materialise(w))
    assert_close(vn.implicit(pushed(f))(predicates, X, w), expected)
    assert_close(pushed(vn.implicit(f))(predicates, X, w), expected)
    with vn.hijax.enabled():
        assert_close(pushed(f)(predicates, X, w), expected)


def test_materialization_in_a_branch_is_reported(name):
    w = MAKERS[name](KEY)
    f = lambda x, w: lax.cond(True, jnp.matmul, lambda x, w: x @ w.T, x, w)
    told = [e.primitive for e in without_rule(vn.explain(f)(X, w))]
    assert told == (["transpose"] if isinstance(w, Lora) else [])


def test_a_carry_that_changes_its_type_is_materialized(name):
    w = MAKERS[name](KEY)
    f = lambda w: lax.fori_loop(0, 3, lambda i, w: w * 2.0, w)
    assert_close(vn.implicit(f)(w), f(vn.materialise(w)))
    assert vn.explain(f)(w).materialised


def test_branches_of_an_implicit_and_a_dense_array(name):
    w = MAKERS[name](KEY)
    f = lambda i, w: lax.switch(i, [lambda w: w, lambda w: w * 2.0, lambda w: w], w)
    for i in range(3):
        assert_close(vn.implicit(f)(jnp.array(i), w), f(i, vn.materialise(w)))


def _step(w, _):
    return w, None


def _small(carry):
    return carry[0] < 3


def _grow(carry):
    return carry[0] + 1, carry[1]


def _same(w):
    return w


LOOPS = {
    "scan": lambda w: lax.scan(_step, w, None, length=3)[0],
    "while_loop": lambda w: lax.while_loop(_small, _grow, (0, w))[1],
    "cond": lambda w: lax.cond(True, _same, _same, w),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_run_eagerly_is_compiled_once(name, loop, caplog):
    w = MAKERS[name](KEY)
    f = vn.implicit(LOOPS[loop])
    assert_close(f(w), vn.materialise(w))
    with jax.log_compiles():
        f(w)
    assert not [r.message for r in caplog.records if "compil" in r.message.lower()]
