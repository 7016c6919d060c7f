"""Loops and branches over implicit arrays, as constants, carries, inputs and results."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import veneer as vn


def over_rows(x, w, high):
    return lax.scan(lambda c, row: (c, jnp.dot(row, high(w))), 0.0, x)[1]


def carried(x, w, high):
    step = lambda c, _: (high(c), None)
    return jnp.dot(x, lax.scan(step, high(w), None, length=2)[0])


def while_carried(x, w, high):
    return jnp.dot(
        x, lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, high(c[1])), (0, high(w)))[1]
    )


def counted(x, w, high):
    return lax.fori_loop(0, 3, lambda i, c: c + jnp.dot(x, high(w)), jnp.zeros((3, 6)))


def branched(x, w, high):
    return lax.cond(x[0, 0] > -9, lambda w: jnp.dot(x, high(w)), lambda w: x @ w, high(w))


def chosen(x, w, high):
    return jnp.dot(x, lax.cond(x[0, 0] > -9, high, lambda w: high(high(w)), high(w)))


def switched(x, w, high):
    return lax.switch(1, [lambda w: x @ w, lambda w: jnp.dot(x, high(w))], w)


def carried_as_it_is(x, w, high):
    return jnp.dot(x, lax.scan(lambda c, _: (high(c), None), w, None, length=2)[0])


def either(x, w, high):
    return jnp.dot(x, lax.cond(x[0, 0] > -9, lambda w: w, high, w))


ONE = [
    carried_as_it_is,
    either,
    over_rows,
    carried,
    while_carried,
    counted,
    branched,
    chosen,
    switched,
]


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("program", ONE)
def test_one_weight(program, jit, x, weight, high, agree):
    run = lambda x, w: program(x, w, high)
    agree((jax.jit(run) if jit else run)(x, weight.value), run(x, weight.dense), atol=1e-4)


DIFFERENTIABLE = [f for f in ONE if f is not while_carried]


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("program", DIFFERENTIABLE)
def test_gradients_of_one_weight(program, jit, x, weight, high, agree_by_leaves):
    loss = lambda w: jnp.sum(jnp.sin(program(x, w, high)))
    transform = (lambda f: jax.jit(jax.grad(f))) if jit else jax.grad
    agree_by_leaves(transform(loss)(weight.value), weight.reference(jax.grad, loss))


def test_a_derivative_through_a_while_loop(x, weight, high, agree):
    t = weight.dense if weight.dense_tangent else weight.value
    found = jax.jvp(lambda w: while_carried(x, w, high), (weight.value,), (t,))[1]
    if weight.dense_tangent:
        expected = x @ t
    else:
        expected = jax.jvp(lambda v: x @ v.materialise(), (weight.value,), (t,))[1]
    agree(found, expected)


def as_inputs(x, ws, high):
    return lax.scan(lambda c, w: (c, jnp.dot(x, high(w))), 0.0, ws)[1]


def as_typed_inputs(x, ws, high):
    typed = jax.vmap(high)(ws)  # its length is inferred
    return lax.scan(lambda c, w: (c, jnp.dot(x, w)), 0.0, typed)[1]


def as_results(x, ws, high):
    return lax.scan(lambda c, w: (c, high(w)), 0.0, ws)[1]


def mapped(x, ws, high):
    return lax.map(lambda w: jnp.dot(x, high(w)), ws)


MANY = [as_inputs, as_typed_inputs, as_results, mapped]


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("program", MANY)
def test_a_stack_of_weights(program, jit, x, weight, high, agree):
    run = lambda x, w: program(x, w, high)
    out = (jax.jit(run) if jit else run)(x, weight.stack)
    agree(out, run(x, weight.dense_stack), atol=1e-4)
    assert type(out) is (type(weight.stack) if program is as_results else type(x))


@pytest.mark.parametrize("program", [as_inputs, as_typed_inputs, mapped])
def test_gradients_of_a_stack(program, x, weight, high, agree_by_leaves):
    loss = lambda w: jnp.sum(jnp.sin(program(x, w, high)))
    expected = weight.reference(jax.grad, loss, stacked=True)
    agree_by_leaves(jax.jit(jax.grad(loss))(weight.stack), expected)


def test_jaxprs_show_types_of_loops(x, weight, high):
    text = str(jax.make_jaxpr(lambda x, w: carried(x, w, high))(x, weight.value))
    name = "q8" if weight.dense_tangent else "lora"
    assert f"{name}[4,6] = scan[" in text


def test_a_body_wrapped_by_functools_is_itself(weight):
    """`functools.wraps` copies the attributes of a function, and a method has its function's."""

    def body(c, _):
        return c, 1.0

    @functools.wraps(body)
    def wrapped(c, x):
        return body(c, x)[0], 2.0

    def negated(w):
        return -branch(w)

    branch = lambda w: jnp.sum(weight.dense)
    ys = lambda body: lax.scan(body, weight.value, None, length=1)[1].item()
    assert ys(body) == 1.0
    assert ys(wrapped) == ys(functools.wraps(body)(wrapped)) == 2.0
    first = lax.cond(True, branch, branch, weight.value)
    negated = functools.wraps(branch)(negated)
    assert lax.cond(True, negated, branch, weight.value) == -first


def test_a_carry_that_becomes_dense_is_refused_by_name():
    q = vn.quant.quantize(jnp.eye(4), "int8")
    loss = lambda w: jnp.sum(lax.fori_loop(0, 3, lambda i, c: c * 0.5, w))
    with pytest.raises(TypeError, match=r"comes in as q8\[4,4\] and goes out as a dense array"):
        jax.grad(loss)(q)
