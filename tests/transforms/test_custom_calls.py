"""custom_vmap, linear_call and composite: calls with their own rules."""

import jax
import jax.numpy as jnp
import pytest
from jax.custom_batching import custom_vmap, sequential_vmap
from jax.custom_derivatives import linear_call
from support.array_types import MAKERS, Tagged, assert_close, lora
from support.policies import only_by_rules

import veneer as vn


@custom_vmap
def batched(x, w):
    return jnp.tanh(x @ w)


@batched.def_vmap
def _(axis_size, in_batched, x, w):
    """Gives the double, so that its use is seen."""
    in_axes = [0 if b else None for b in in_batched]
    return 2 * jax.vmap(lambda x, w: jnp.tanh(x @ w), in_axes, axis_size=axis_size)(x, w), True


@sequential_vmap
def sequential(x, w):
    return jnp.tanh(x @ w)


def linear(x, w):
    """x @ w, with half of the true transpose, so that its use is seen."""
    return linear_call(lambda w, x: x @ w, lambda w, ct: ct @ w.T / 2, w, x)


def composite(x, w):
    return jax.lax.composite(lambda x, w: jnp.tanh(x @ w), name="test.call")(x, w)


CALLS = {f.__name__: f for f in (batched, sequential, linear, composite)}
BATCHED = ["batched", "sequential", "linear"]


@pytest.fixture
def x():
    return jax.random.normal(jax.random.key(1), (2, 6))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_programs_inside_custom_calls_run_the_rules(make, name, x):
    w = make(jax.random.key(0))
    f = CALLS[name]
    expected = jax.jit(f)(x, vn.materialise(w))
    assert_close(jax.jit(vn.implicit(f, on_materialise=only_by_rules))(x, w), expected)


@pytest.mark.parametrize("name", ["batched", "sequential"])
@pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0)], ids=str)
@pytest.mark.parametrize("kind", ["lora", "int4"])
def test_vmap_runs_the_rule_that_the_call_brings(kind, in_axes, name):
    f = CALLS[name]
    xs = jax.random.normal(jax.random.key(1), (3, 2, 6) if in_axes[0] == 0 else (2, 6))
    w = MAKERS[kind](jax.random.key(0), (3, 6, 6) if in_axes[1] == 0 else (6, 6))
    expected = jax.vmap(f, in_axes)(xs, vn.materialise(w))
    assert_close(jax.vmap(vn.implicit(f), in_axes)(xs, w), expected)
    assert_close(vn.implicit(jax.vmap(f, in_axes))(xs, w), expected)
    assert_close(jax.jit(jax.vmap(jax.jit(vn.implicit(f)), in_axes))(xs, w), expected)


def test_a_value_with_one_batched_leaf_is_batched(x):
    w = lora(jax.random.key(0))
    scales = jnp.arange(3.0)
    f = lambda s: batched(x, w.w + s * (w.a @ w.b))
    g = lambda s: vn.implicit(batched)(x, type(w)(w.w, s * w.a, w.b))
    assert_close(jax.vmap(g)(scales), jax.vmap(f)(scales))


@pytest.mark.parametrize("name", ["batched", "sequential", "linear"])
@pytest.mark.parametrize("kind", ["lora", "int4"])
def test_forward_derivatives_agree_with_dense(kind, name, x):
    """JAX has no reverse-mode derivative of a custom_vmap."""
    f, w = CALLS[name], MAKERS[kind](jax.random.key(0))
    expected = jax.jvp(lambda x: f(x, vn.materialise(w)), (x,), (x + 1,))
    assert_close(jax.jvp(lambda x: vn.implicit(f)(x, w), (x,), (x + 1,)), expected)
    assert_close(
        vn.implicit(lambda x, w: jax.jvp(lambda x: f(x, w), (x,), (x + 1,)))(x, w), expected
    )


@pytest.mark.parametrize("kind", ["lora", "int4"])
def test_linear_call_uses_its_own_transpose(kind, x):
    w = MAKERS[kind](jax.random.key(0))
    loss = lambda x, w: jnp.sum(jnp.sin(linear(x, w)))
    expected = jax.grad(loss)(x, vn.materialise(w))
    assert_close(jax.grad(vn.implicit(loss))(x, w), expected)
    assert_close(vn.implicit(jax.grad(loss))(x, w), expected)
    assert_close(jax.jit(jax.grad(jax.jit(vn.implicit(loss))))(x, w), expected)


@jax.custom_vjp
def remembered(x, w):
    return jnp.tanh(x @ w)


def _fwd(x, w):
    return jnp.tanh(x @ w), (x, w)


def _bwd(residuals, ct):
    x, w = residuals
    return 3 * ct @ w.T, x.T @ ct  # not the true ones, so that their use is seen


remembered.defvjp(_fwd, _bwd, optimize_remat=True)


@pytest.mark.parametrize("kind", ["lora", "int4"])
def test_a_custom_vjp_optimized_for_checkpoint(kind, x):
    w = MAKERS[kind](jax.random.key(0))
    loss = lambda x, w: jnp.sum(jax.checkpoint(remembered)(x, w) ** 2)
    expected = jax.grad(loss)(x, vn.materialise(w))
    assert_close(jax.grad(vn.implicit(loss))(x, w), expected, 1e-4)
    assert_close(vn.implicit(jax.grad(loss))(x, w), expected, 1e-4)


def test_linear_call_keeps_a_label():
    x = Tagged(jnp.arange(3.0), "kg")
    negate = lambda x: linear_call(lambda _, x: -x, lambda _, ct: -ct, (), x)
    out = vn.implicit(negate)(x)
    assert out.label == "kg"
    assert_close(out.x, -x.x)
    (ct,) = jax.vjp(vn.implicit(negate), x)[1](out)
    assert_close(ct.x, x.x)


def test_a_custom_vmap_keeps_a_label():
    x = Tagged(jnp.ones((2, 3)), "kg")
    out = jax.vmap(vn.implicit(sequential_vmap(jnp.sin)))(x)
    assert out.label == "kg"
    assert_close(out.x, jnp.sin(x.x))


def test_a_batching_rule_that_loses_a_label_raises():
    f = custom_vmap(jnp.sin)

    @f.def_vmap
    def _(axis_size, in_batched, x):
        return jnp.zeros(x.shape), True

    with pytest.raises(
        TypeError,
        match=r"is Tagged:f32\[3\] for one example, but .* returns f32\[3\] for each example",
    ):
        jax.vmap(vn.implicit(f))(Tagged(jnp.ones((2, 3)), "kg"))
