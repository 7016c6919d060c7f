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
def test_loops_and_branches_take_a_weight(program, jit, x, weight, high, agree):
    run = lambda x, w: program(x, w, high)
    agree((jax.jit(run) if jit else run)(x, weight.value), run(x, weight.dense), atol=1e-4)


DIFFERENTIABLE = [f for f in ONE if f is not while_carried]


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("program", DIFFERENTIABLE)
def test_gradients_of_a_weight_in_loops_agree(program, jit, x, weight, high, agree_by_leaves):
    loss = lambda w: jnp.sum(jnp.sin(program(x, w, high)))
    transform = (lambda f: jax.jit(jax.grad(f))) if jit else jax.grad
    agree_by_leaves(transform(loss)(weight.value), weight.reference(jax.grad, loss))


def test_a_while_loop_has_forward_derivatives(x, weight, high, agree):
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
def test_scan_slices_and_stacks_weights(program, jit, x, weight, high, agree):
    run = lambda x, w: program(x, w, high)
    out = (jax.jit(run) if jit else run)(x, weight.stack)
    agree(out, run(x, weight.dense_stack), atol=1e-4)
    assert type(out) is (type(weight.stack) if program is as_results else type(x))


@pytest.mark.parametrize("program", [as_inputs, as_typed_inputs, mapped])
def test_gradients_of_stacked_weights_agree(program, x, weight, high, agree_by_leaves):
    loss = lambda w: jnp.sum(jnp.sin(program(x, w, high)))
    expected = weight.reference(jax.grad, loss, stacked=True)
    agree_by_leaves(jax.jit(jax.grad(loss))(weight.stack), expected)


def test_a_scan_prints_the_type_of_its_result(x, weight, high):
    text = str(jax.make_jaxpr(lambda x, w: carried(x, w, high))(x, weight.value))
    name = "q8" if weight.dense_tangent else "lora"
    assert f"{name}[4,6] = scan[" in text


def test_functools_wraps_does_not_confuse_bodies(weight):
    """`functools.wraps` copies the attribute in which a wrapped body is cached."""

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


# Values of two types in a carry or among results of branches are materialized.


def halves(c):
    return 0.5 * jnp.sin(c)


MEET = {
    "scan": lambda w, see: lax.scan(lambda c, _: (halves(c), None), see(w), None, length=3)[0],
    "scan, by keywords": lambda w, see: lax.scan(
        f=lambda c, _: (halves(c), c.sum()), init=see(w), length=3
    )[1],
    "fori_loop": lambda w, see: lax.fori_loop(0, 3, lambda i, c: halves(c), see(w)),
    "a loop of unknown length": lambda w, see: lax.fori_loop(
        0, jnp.int32(3), lambda i, c: halves(c), see(w)
    ),
    "while_loop": lambda w, see: lax.while_loop(
        lambda c: jnp.sum(c**2) > 0.1, lambda c: halves(c), see(w)
    ),
    "while_loop, by keywords": lambda w, see: lax.while_loop(
        cond_fun=lambda c: c[0] < 3,
        body_fun=lambda c: (c[0] + 1, halves(c[1])),
        init_val=(0, see(w)),
    )[1],
    "one after another": lambda w, see: lax.scan(
        lambda c, _: ((c[1], halves(c[2]), c[0]), None), (see(w), see(w), see(w)), None, length=4
    )[0][2],
    "one that begins dense": lambda w, see: lax.scan(
        lambda c, _: (see(w), jnp.sum(c)), jnp.ones(w.shape), None, length=2
    )[0],
    "nested": lambda w, see: lax.fori_loop(
        0, 2, lambda i, c: lax.fori_loop(0, 2, lambda i, c: halves(c), c), see(w)
    ),
    "cond": lambda w, see: lax.cond(True, lambda w: see(w), halves, w),
    "cond, by keywords": lambda w, see: lax.cond(
        pred=True, true_fun=lambda w: halves(w), false_fun=lambda w: see(w), operand=w
    ),
    "cond without operands": lambda w, see: lax.cond(
        False, lambda: (see(w), 1.0), lambda: (halves(w), 2.0)
    )[0],
    "one side a tree": lambda w, see: lax.cond(False, lambda: see(w), lambda: w),
    "switch": lambda w, see: lax.switch(
        1, [lambda w: see(w), lambda w: see(w), lambda w: halves(w)], see(w)
    ),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("typed", [False, True], ids=["a tree", "typed"])
@pytest.mark.parametrize("name", MEET)
def test_two_types_in_a_carry_or_branches_agree(name, typed, jit, weight, high, agree):
    program = lambda w: MEET[name](w, high if typed else lambda w: w)
    agree((jax.jit(program) if jit else program)(weight.value), program(weight.dense))


@pytest.mark.parametrize("typed", [False, True], ids=["a tree", "typed"])
@pytest.mark.parametrize("name", [n for n in MEET if "while" not in n and "unknown" not in n])
def test_gradients_through_two_types_agree(name, typed, weight, high, agree_by_leaves):
    loss = lambda w: jnp.sum(jnp.sin(MEET[name](w, high if typed else lambda w: w)))
    agree_by_leaves(jax.jit(jax.grad(loss))(weight.value), weight.reference(jax.grad, loss))


@pytest.mark.parametrize("name", ["scan", "while_loop", "cond"])
def test_materialization_in_loops_is_reported(name, weight, high):
    program, events = lambda w: MEET[name](w, high), []
    vn.implicit(jax.jit(program), False, on_materialise=events.append)(weight.value)
    assert name.removesuffix("_loop") in {event.primitive for event in events}


CONDITIONS = {
    "cond": lambda p, x: lax.cond(p(x), jnp.sin, jnp.cos, x),
    "cond, by keywords": lambda p, x: lax.cond(
        pred=p(x), true_fun=jnp.sin, false_fun=jnp.cos, operand=x
    ),
    "switch": lambda p, x: lax.switch(p(x).astype("int32"), [jnp.sin, jnp.cos], x),
    "while_loop": lambda p, x: lax.while_loop(p, lambda x: x + 1, x),
    "while_loop of several": lambda p, x: lax.while_loop(
        lambda c: p(c[1]), lambda c: (c[0], c[1] + 1), (0, x)
    )[1],
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("name", CONDITIONS)
def test_an_implicit_condition_is_materialized(name, jit):
    x = vn.types.Masked(jnp.arange(3.0), jnp.array([True, False, True]))
    run = lambda p: lambda x: CONDITIONS[name](p, x)
    refused = run(lambda x: jnp.sum(x) < 9)  # it may be invalid, so it has no dense form
    with pytest.raises(TypeError, match=r"Masked.* has no dense form"):
        (jax.jit(refused) if jit else refused)(x)
    lazy = run(lambda x: jnp.sum(vn.types.Lazy(lambda x: x, x)) < 9)
    run_dense = run(lambda x: jnp.sum(x) < 9)
    found = (jax.jit(lazy) if jit else lazy)(x.value)
    assert (found == run_dense(x.value)).all()


def test_a_body_returns_a_value_that_it_constructs(high, agree):
    body = lambda i, d: vn.types.Diagonal(jnp.arange(3.0) + i)
    out = jax.lax.fori_loop(0, 3, body, high(vn.types.Diagonal(jnp.ones(3))))
    assert type(out) is vn.types.Diagonal
    agree(out, jnp.diag(jnp.arange(3.0) + 2))


def test_storage_types_that_differ_are_materialized(high):
    upper = vn.types.Triangular(jnp.ones((4, 4)), lower=False)
    sparse = vn.types.NMSparse.prune(jnp.arange(16.0).reshape(4, 4), 2, 4)
    flipped = lambda w: lax.scan(lambda c, _: (c.T, None), w, None, length=3)[0]
    assert (jax.jit(lambda w: flipped(high(w)))(upper) == vn.materialise(upper).T).all()
    assert (jax.jit(flipped)(sparse) == vn.materialise(sparse).T).all()


def test_a_change_of_units_raises():
    m = vn.types.Quantity(jnp.ones(3), "m")
    squares = lambda c: c * c
    for loop, name in (
        (
            lambda m: lax.scan(lambda c, _: (squares(c), None), m, None, length=3)[0],
            "carry 0 of scan",
        ),
        (lambda m: lax.while_loop(lambda c: True, squares, m), "carry 0 of while_loop"),
        (lambda m: lax.cond(True, squares, lambda m: m, m), "output 0 of cond"),
        (lambda m: lax.switch(0, [squares, lambda m: m], m), "output 0 of switch"),
    ):
        with pytest.raises(TypeError, match=rf"{name} is Quantity.*: their metadata differs"):
            jax.jit(loop)(m)


def test_a_zero_takes_any_unit():
    m = vn.types.Quantity(jnp.arange(3.0), "m")
    last = lambda m: lax.scan(lambda c, v: (v, None), jnp.zeros(()), m)[0]
    assert str(jax.jit(last)(m)) == str(m[2])
    with pytest.raises(TypeError, match=r"carry 0 of scan .* Quantity refuses to be dense"):
        jax.jit(lambda m: lax.scan(lambda c, v: (v, None), jnp.ones(()), m)[0])(m)


def test_different_structures_raise_the_error_of_jax(weight, high):
    """The error is the same as for dense arrays."""
    for program in (
        lambda w: lax.scan(lambda c, _: (c[0], None), high(w), None, length=2),
        lambda w: lax.cond(True, lambda: high(w), lambda: (w, w)),
    ):
        with pytest.raises(TypeError, match=r"carry input and carry output|same pytree structure"):
            jax.jit(program)(weight.value)


def test_branches_for_platforms_return_the_same_type(high):
    """`jnp.diagonal` has branches for platforms, which return different types here."""
    halves = vn.types.SparseArray(jnp.ones(2, "float16"), jnp.array([[0, 2], [2, 2]]), (3, 3))
    dense = vn.materialise(halves)
    assert (vn.materialise(jnp.diagonal(high(halves))) == jnp.diagonal(dense)).all()
    jitted = jax.jit(lambda w: jnp.diagonal(w) * 2)(halves)
    assert (vn.materialise(jitted) == 2 * jnp.diagonal(dense)).all()
