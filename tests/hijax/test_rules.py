"""Derivatives by leaves in the rules of `jax.custom_jvp` and `jax.custom_vjp`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import arrays

import veneer as vn
from veneer.hijax import mode

LORA = vn.types.LoraArray(arrays.ones((3, 4)), arrays.full((3, 2), 0.5), arrays.full((2, 4), 0.25))


@pytest.fixture(autouse=True)
def high_types():
    with vn.hijax.enabled():
        yield


def with_jvp(use):
    """Return a function whose JVP rule passes the tangent to `use`."""
    f = jax.custom_jvp(lambda w: jnp.sum(jnp.tanh(w)))
    f.defjvp(lambda primals, tangents: (f(*primals), use(*primals, *tangents)))
    return f


def with_vjp(use):
    """Return a function whose VJP rule passes the cotangent to `use`."""
    f = jax.custom_vjp(lambda w: w)
    as_leaves = lambda w, ct: (jax.tree.map(lambda x: jnp.full_like(x, use(w, ct)), ct),)
    f.defvjp(lambda w: (w, w), as_leaves)
    return lambda w: jnp.sum(jnp.tanh(f(w)))


RUN = {
    "jvp": lambda f: jax.jvp(f, (LORA,), (jax.tree.map(jnp.ones_like, LORA),)),
    "linearize": lambda f: jax.linearize(f, LORA)[1](jax.tree.map(jnp.ones_like, LORA)),
    "grad": lambda f: jax.grad(f)(LORA),
    "jitted": lambda f: jax.jit(jax.grad(f))(LORA),
    "of a typed value": lambda f: jax.jit(jax.grad(lambda w: f(jnp.multiply(w, 2.0))))(LORA),
    "in a checkpoint": lambda f: jax.grad(jax.checkpoint(lambda w: f(w * 2.0)))(LORA),
}
GIVEN = [(with_jvp, name) for name in RUN]
GIVEN += [(with_vjp, name) for name in RUN if name not in ("jvp", "linearize")]
given = pytest.mark.parametrize(("rule", "run"), GIVEN)

AS_AN_ARRAY = {
    "sum": jnp.sum,
    "function of lax": lambda t: jnp.sum(lax.neg(t)),
    "operator": lambda t: jnp.sum(t * 2),
    "method": lambda t: t.sum(),
    "index": lambda t: t[0, 0],
    "product": lambda t: jnp.sum(jnp.ones((1, 3)) @ t),
    "jitted, of jax.numpy": jnp.linalg.norm,
    "jitted": jax.jit(jnp.sum),
    "of jax.nn": lambda t: jnp.sum(jax.nn.relu(t)),
    "custom_jvp": with_jvp(lambda w, t: t),
    "checkpoint": jax.checkpoint(jnp.sum),
    "vmap": lambda t: jnp.sum(jax.vmap(jnp.sum)(t)),
    "scan": lambda t: lax.scan(lambda c, x: (c + jnp.sum(x), None), 0.0, t)[0],
    "carry": lambda t: jnp.sum(lax.fori_loop(0, 2, lambda _, x: x * 1.0, t)),
    "branch": lambda t: lax.cond(True, jnp.sum, lambda x: 0.0, t),
    "mapped by leaves": lambda t: jnp.sum(jax.tree.map(lambda x: 2 * x, t)),
    "dense": lambda t: jnp.sum(vn.materialise(t)),
}


@given
@pytest.mark.parametrize("name", AS_AN_ARRAY)
def test_derivatives_are_no_arrays(name, rule, run):
    with pytest.raises(TypeError, match=r"not an array.*compute on the leaves"):
        RUN[run](rule(lambda w, t: AS_AN_ARRAY[name](t)))


def test_a_cached_call_rejects_a_derivative():
    """A derivative has the same leaves as an array, so JAX finds a compiled program."""
    norm = jax.jit(jnp.linalg.norm)
    for _ in range(2):
        norm(LORA)
    for use in (lambda w, t: norm(t), lambda w, t: norm(w) + norm(w) + norm(t)):
        with pytest.raises(TypeError, match="not an array"):
            RUN["grad"](with_vjp(use))
    assert np.isfinite(norm(LORA))


BY_LEAVES = {
    "a field": lambda w, t: jnp.sum(w.a * t.a),
    "leaves": lambda w, t: sum(map(jnp.sum, jax.tree.leaves(t))),
    "jax.tree.map": lambda w, t: jax.tree.map(lambda w, t: jnp.sum(w * t), w, t).b,
    "another tree": lambda w, t: jnp.sum(jax.tree.map(lambda t: 2 * t, t).w),
    "jitted": jax.jit(lambda w, t: jnp.sum(w.a * t.a)),
    "checkpoint": jax.checkpoint(lambda w, t: jnp.sum(w.a * t.a)),
    "jvp": lambda w, t: jax.jvp(lambda w: jnp.sum(jnp.sin(w)), (w,), (t,))[1],
    "vjp": lambda w, t: jnp.sum(jax.vjp(lambda w: w * 2, w)[1](t)[0].a),
}


@given
@pytest.mark.parametrize("name", BY_LEAVES)
def test_a_derivative_has_the_fields_of_the_class(name, rule, run):
    if name == "vjp" and rule is with_jvp and run not in ("jvp", "linearize"):
        pytest.skip("a transpose is not transposed again")
    expected = jax.tree.map(lambda _: 0.0, LORA)

    def of_leaves(w, t):
        assert type(w) is type(t) is type(LORA)
        return BY_LEAVES[name](w, t)

    found = RUN[run](rule(of_leaves))
    leaves = jax.tree.leaves(found)
    assert leaves
    assert all(np.isfinite(x).all() for x in leaves)
    assert len(leaves) in (1, 2, len(jax.tree.leaves(expected)))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("typed", [False, True], ids=["a tree", "typed"])
def test_a_rule_by_leaves_is_used(typed, jit):
    """The rule gives an implicit result by the tangent of each leaf."""
    double = jax.custom_jvp(lambda w: jnp.multiply(w, 2.0))

    @double.defjvp
    def _(primals, tangents):
        (w,), (t,) = primals, tangents
        return double(w), type(t)(2 * t.w, t.a, 2 * t.b)

    see = (lambda w: jnp.transpose(jnp.transpose(w))) if typed else lambda w: w
    loss = lambda f: lambda w: jnp.sum(jnp.sin(f(see(w))))
    of = lambda f: (jax.jit(jax.grad(loss(f))) if jit else jax.grad(loss(f)))(LORA)
    expected = of(lambda w: jnp.multiply(w, 2.0))
    assert type(expected) is type(LORA)
    for x, y in zip(jax.tree.leaves(of(double)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)


@pytest.mark.parametrize("f", [jax.nn.softplus, jax.nn.relu, lambda w: jnp.logaddexp(1.0, w)])
def test_jax_functions_with_rules_reject_derivatives_by_leaves(f):
    np.testing.assert_allclose(f(LORA), f(vn.materialise(LORA)), rtol=1e-5)
    np.testing.assert_allclose(jax.jit(f)(LORA), f(vn.materialise(LORA)), rtol=1e-5)
    with pytest.raises(TypeError, match=r"not an array\. Differentiate vn\.materialise"):
        jax.grad(lambda w: jnp.sum(f(w)))(LORA)
    by_leaf = jax.grad(lambda w: jnp.sum(f(vn.materialise(w))))(LORA)
    assert type(by_leaf) is type(LORA)


def test_derivatives_by_integer_leaves_raise_and_name_the_type():
    """The shape that the rule asks for is taken from the dense array."""
    w = vn.types.NMSparse.prune(jnp.arange(16.0).reshape(4, 4), 2, 4, -1)
    with pytest.raises(TypeError, match=r"NMSparse: derivatives with respect to the leaves"):
        jax.grad(lambda w: jnp.sum(jax.nn.relu(w)), allow_int=True)(w)


def test_gradients_are_no_arrays():
    gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(w)))(LORA)
    for use in (lax.neg, lambda g: g * 2, lambda g: LORA - 0.1 * g, vn.materialise):
        with pytest.raises(TypeError, match=r"not an array.*compute on the leaves"):
            use(gradient)
    stepped = jax.tree.map(lambda w, g: w - 0.1 * g, LORA, gradient)
    assert jnp.sum(stepped) < jnp.sum(LORA)


def test_calls_are_fast_again_after_a_rule():
    """Inside a rule, Python flattens the arguments of calls."""
    RUN["grad"](with_vjp(lambda w, t: jnp.sum(jax.jit(lambda t: t.a)(t))))
    assert mode.is_enabled()
    traces = []
    f = jax.jit(lambda w: traces.append(1) or jnp.sum(w.a))
    assert f(LORA) == f(LORA)
    assert len(traces) == 1
