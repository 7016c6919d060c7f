"""scan, while, fori, cond, switch and map: values as constants, carries, inputs and results."""

import jax
import jax.numpy as jnp
import pytest
from array_types import MAKERS, Lora, Tagged, assert_close

import veneer as vn

X = jnp.linspace(-1.0, 1.0, 18).reshape(3, 6)
KEY = jax.random.key(4)

pytestmark = pytest.mark.parametrize("name", MAKERS)


def make(name, *batch):
    w = MAKERS[name](KEY, (*batch, 6, 6))
    return w, vn.materialise(w)


def check(f, *operands, events=0):
    """`f` on values agrees with `f` on dense arrays, eagerly and under jit."""
    dense = vn.materialise(operands)
    expected = f(*dense)
    out = vn.implicit(f)(*operands)
    assert_close(out, expected)
    assert_close(jax.jit(vn.implicit(f))(*operands), expected)
    assert len(vn.explain(f)(*operands).materialised) == events
    return out


def test_scan_over_layers(name):
    ws, _ = make(name, 4)
    check(lambda x, ws: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), x.sum()), x, ws), X, ws)


@pytest.mark.parametrize("options", [{"reverse": True}, {"unroll": 2}], ids=str)
def test_scan_options(name, options):
    ws, _ = make(name, 4)
    f = lambda x, ws: jax.lax.scan(lambda x, w: (x @ w, None), x, ws, **options)[0]
    check(f, X, ws)
    equations = jax.make_jaxpr(vn.implicit(f))(X, ws).eqns
    (scan,) = [e for e in equations if e.primitive.name == "scan"]
    assert options.items() <= scan.params.items()


def test_scan_of_length_zero(name):
    ws, _ = make(name, 0)
    check(lambda x, ws: jax.lax.scan(lambda x, w: (x @ w, x.sum()), x, ws), X, ws)


def test_scan_constants_and_results(name):
    w, _ = make(name)
    f = lambda x, w: jax.lax.scan(lambda x, _: (x @ w, w), x, None, length=3)
    _, stacked = check(f, X, w)
    assert type(stacked) is type(w)


def test_a_carry_that_keeps_its_type(name):
    w, _ = make(name)
    f = lambda x, w: jax.lax.scan(lambda c, _: ((c[0] @ c[1], c[1]), None), (x, w), None, length=2)
    (_, carried), _ = check(f, X, w)
    assert type(carried) is type(w)


def test_a_carry_that_changes_type_is_made_dense_and_says_so(name):
    w, _ = make(name)
    f = lambda w: jax.lax.fori_loop(0, 3, lambda i, w: w * 2.0, w)
    dense = vn.materialise(w)
    assert_close(vn.implicit(f)(w), f(dense))
    assert vn.explain(f)(w).materialised


def test_while(name):
    w, _ = make(name)
    f = lambda x, w: jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (c[0] @ w, c[1] + 1), (x, 0))
    check(f, X, w)


def test_while_whose_condition_uses_it(name):
    w, _ = make(name)
    f = lambda x, w: jax.lax.while_loop(lambda x: jnp.abs(x @ w).sum() < 50, lambda x: x * 2, x)
    check(f, X, w)


def test_cond(name):
    w, _ = make(name)
    f = lambda p, x, w: jax.lax.cond(p, lambda x, w: x @ w, lambda x, w: x @ w.T * 2, x, w)
    for predicate in (True, False):
        # A Lora has no rule for its transpose.
        expected = int(isinstance(w, Lora))
        check(f, jnp.array(predicate), X, w, events=expected)


def test_switch_between_types(name):
    w, dense = make(name)
    branches = [lambda w: w, lambda w: w * 2.0, lambda w: w]
    f = lambda i, w: jax.lax.switch(i, branches, w)
    for i in range(3):
        assert_close(vn.implicit(f)(jnp.array(i), w), f(i, dense))


def test_branches_that_agree_keep_the_type(name):
    w, _ = make(name)
    out = check(lambda p, w: jax.lax.cond(p, lambda w: w, lambda w: w, w), jnp.array(True), w)
    assert type(out) is type(w)


def test_map(name):
    ws, _ = make(name, 2)
    check(lambda ws: jax.lax.map(lambda w: X @ w, ws), ws)


def test_gradient_through_a_scan(name):
    ws, dense = make(name, 3)
    f = lambda x, ws: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0].sum()
    assert_close(jax.grad(vn.implicit(f))(X, ws), jax.grad(f)(X, dense), tol=2e-5)
    assert_close(vn.implicit(jax.grad(f))(X, ws), jax.grad(f)(X, dense), tol=2e-5)
    assert_close(vn.implicit(jax.grad(f, 1))(X, ws), jax.grad(f, 1)(X, dense), tol=2e-5)


def test_vmap_of_a_scan(name):
    ws, dense = make(name, 3)
    f = lambda x, ws: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]
    expected = jax.vmap(f, (0, None))(X, dense)
    assert_close(jax.vmap(vn.implicit(f), (0, None))(X, ws), expected)
    assert_close(vn.implicit(jax.vmap(f, (0, None)))(X, ws), expected)


def test_nested_loops(name):
    ws, _ = make(name, 2)
    inner = lambda x, w: jax.lax.fori_loop(0, 2, lambda i, x: jnp.tanh(x @ w), x)
    check(lambda x, ws: jax.lax.scan(lambda x, w: (inner(x, w), None), x, ws)[0], X, ws)


def test_metadata_is_never_dropped(name):
    del name
    loop = lambda body: lambda t: jax.lax.fori_loop(0, 2, lambda i, t: body(t), t)
    tagged = Tagged(X, "m")
    assert vn.implicit(loop(jnp.sin))(tagged).label == "m"
    with pytest.raises(RuntimeError, match="refuses to lose its label"):
        vn.implicit(loop(jnp.exp))(tagged)
    choose = lambda t: jax.lax.cond(
        True, lambda t: (t, jnp.ones(2)), lambda t: (-t, jnp.zeros(2)), t
    )
    assert vn.implicit(choose)(tagged)[0].label == "m"
    with pytest.raises(TypeError, match=r"output 0 of cond is .* and Tagged refuses to be dense"):
        vn.implicit(lambda t: jax.lax.cond(True, lambda t: t, lambda t: X, t))(tagged)


def test_a_loop_that_vmap_gives_a_predicate_an_element(name):
    w, dense = make(name)
    f = lambda w: jax.vmap(lambda n: jax.lax.fori_loop(0, n, lambda i, x: jnp.tanh(x @ w), X))
    counts = jnp.array([0, 2, 1])
    assert_close(vn.implicit(lambda w: f(w)(counts))(w), f(dense)(counts))
    assert_close(jax.jit(vn.implicit(lambda w: f(w)(counts)))(w), f(dense)(counts))


def _step(w, _):
    return w, None


def _small(carry):
    return carry[0] < 3


def _grow(carry):
    return carry[0] + 1, carry[1]


def _same(w):
    return w


LOOPS = {
    "scan": lambda w: jax.lax.scan(_step, w, None, length=3)[0],
    "while_loop": lambda w: jax.lax.while_loop(_small, _grow, (0, w))[1],
    "cond": lambda w: jax.lax.cond(True, _same, _same, w),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_run_eagerly_is_compiled_once(name, loop, caplog):
    w, dense = make(name)
    f = vn.implicit(LOOPS[loop])
    assert_close(f(w), dense)
    with jax.log_compiles():
        f(w)
    assert not [r.message for r in caplog.records if "compil" in r.message.lower()]
