"""Primitives that return their operand, such as `copy`, act on each leaf of any type."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint
from support.array_types import MAKERS, OneHot, Tagged, assert_close, lora
from support.policies import only_by_rules

import veneer as vn

IDENTITIES = {
    "copy": jax.lax.copy_p.bind,
    "stop_gradient": jax.lax.stop_gradient,
    "checkpoint_name": lambda x: checkpoint_name(x, "x"),
    "optimization_barrier": jax.lax.optimization_barrier,
    "layout_constraint": lambda x: with_layout_constraint(x, Layout((1, 0))),
}
REFUSING = {
    "tagged": (lambda: Tagged(jnp.ones((3, 4)), "kg"), None),
    "one hot": (lambda: OneHot(jnp.float32(2.0), 1, n=3), "layout_constraint"),
}


def strict(f):
    return vn.implicit(f, on_materialise=only_by_rules)


@pytest.mark.parametrize("name", IDENTITIES)
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_identities_keep_the_type_and_the_value(make, name):
    x = make(jax.random.key(0))
    out = jax.jit(strict(IDENTITIES[name]))(x)
    assert jax.tree.structure(out) == jax.tree.structure(x)
    assert [leaf.dtype for leaf in jax.tree.leaves(out)] == [
        leaf.dtype for leaf in jax.tree.leaves(x)
    ]
    assert_close(out, x)


@pytest.mark.parametrize("name", IDENTITIES)
@pytest.mark.parametrize(("make", "unfit"), REFUSING.values(), ids=REFUSING)
def test_a_type_that_cannot_be_materialized_is_kept(make, unfit, name):
    if name == unfit:
        pytest.skip("the layout is of a matrix")
    x = make()
    out = strict(IDENTITIES[name])(x)
    assert jax.tree.structure(out) == jax.tree.structure(x)
    assert all(
        jnp.array_equal(a, b) for a, b in zip(jax.tree.leaves(out), jax.tree.leaves(x), strict=True)
    )


@pytest.mark.parametrize(
    "name", sorted(IDENTITIES.keys() - {"layout_constraint"})
)  # JAX has no vmap of it
def test_identities_keep_the_type_under_vmap(name):
    x = MAKERS["int4"](jax.random.key(0), (3, 6, 6))
    for f in (jax.vmap(strict(IDENTITIES[name])), strict(jax.vmap(IDENTITIES[name]))):
        assert jax.tree.structure(f(x)) == jax.tree.structure(x)
        assert_close(f(x), x)


def test_a_barrier_of_several_operands_keeps_each():
    x, q, y = jnp.ones(2), MAKERS["int8"](jax.random.key(0)), Tagged(jnp.zeros(3), "kg")
    barrier = strict(lambda *xs: jax.lax.optimization_barrier(xs))
    out = jax.jit(barrier)(x, q, y)
    assert jax.tree.structure(out) == jax.tree.structure((x, q, y))
    program = str(jax.make_jaxpr(barrier)(x, q, y))
    assert program.count("optimization_barrier") == 1


@pytest.mark.parametrize("name", ["copy", "checkpoint_name", "optimization_barrier"])
def test_gradients_pass_through_identities(name):
    w, x = lora(jax.random.key(0)), jnp.ones((2, 6))
    loss = lambda w, x: jnp.sum((x @ IDENTITIES[name](w)) ** 2)
    of_leaves = jax.grad(lambda w, x: loss(w.materialise(), x))(w, x)
    assert_close(jax.tree.leaves(jax.grad(strict(loss))(w, x)), jax.tree.leaves(of_leaves), 1e-4)
    dense = jax.grad(loss)(vn.materialise(w), x)
    assert_close(vn.implicit(jax.grad(loss))(w, x), dense, 1e-4)


def test_stop_gradient_stops_the_gradient_of_every_leaf():
    w, x = lora(jax.random.key(0)), jnp.ones((2, 6))
    loss = lambda w, x: jnp.sum((x @ jax.lax.stop_gradient(w)) ** 2)
    grads = jax.grad(strict(loss))(w, x)
    assert all(not leaf.any() for leaf in jax.tree.leaves(grads))
    assert not vn.implicit(jax.grad(loss))(w, x).any()


def test_a_rule_that_names_a_type_wins():
    class Loud(vn.ImplicitArray):
        x: jax.Array

        def materialise(self):
            return self.x

    @vn.register("copy")
    def _(x: Loud, **params):
        return x.x + 1

    assert strict(jax.lax.copy_p.bind)(Loud(jnp.zeros(2))).tolist() == [1, 1]


def test_materialise_in_a_program_is_not_a_fallback():
    q, x = MAKERS["nf4"](jax.random.key(0)), jnp.ones((2, 6))
    f = lambda q, x: x + vn.materialise(q)[0]
    assert_close(jax.jit(strict(jax.jit(f)))(q, x), f(vn.materialise(q), x))
    assert not vn.explain(f)(q, x).materialised


def test_dce_sink_keeps_every_leaf():
    q = MAKERS["int8"](jax.random.key(0))
    program = jax.make_jaxpr(strict(lambda q: jax.lax.dce_sink(q)))(q)
    assert str(program).count("dce_sink") == len(jax.tree.leaves(q))


def test_a_lower_precision_is_no_identity():
    q = MAKERS["int8"](jax.random.key(0))
    reduce = lambda x: jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=2)
    assert_close(vn.implicit(reduce)(q), reduce(vn.materialise(q)))
    assert vn.explain(reduce)(q).materialised


# Checkpoint policies.

POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots without batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "named": jax.checkpoint_policies.save_only_these_names("w"),
    "all but named": jax.checkpoint_policies.save_any_names_but_these("w"),
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["w"],
        names_which_can_be_offloaded=["y"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("kind", ["lora", "int4"])
def test_a_checkpoint_policy_changes_no_value(kind, policy):
    w, x = MAKERS[kind](jax.random.key(0)), jax.random.normal(jax.random.key(1), (2, 6))
    run = strict if kind == "int4" else vn.implicit  # this LoRA has no rule for x @ w.T

    def loss(x, w):
        w = checkpoint_name(w, "w")
        y = checkpoint_name(jnp.tanh(x @ w), "y")
        return jnp.sum((y @ w) ** 2)

    checked = jax.checkpoint(loss, policy=policy)
    dense = jax.jit(jax.value_and_grad(loss))(x, vn.materialise(w))
    for f in (jax.value_and_grad(run(checked)), run(jax.value_and_grad(checked))):
        assert_close(jax.jit(f)(x, w), dense, 1e-4)


def test_a_named_implicit_value_is_saved_by_its_leaves(capsys):
    w, x = lora(jax.random.key(0)), jnp.ones((2, 6))
    policy = jax.checkpoint_policies.save_only_these_names("w")
    f = jax.checkpoint(lambda w: jnp.sum(jnp.sin(x @ checkpoint_name(w, "w"))), policy=policy)
    scaled = lambda s: strict(f)(jax.tree.map(lambda leaf: leaf * s, w))
    jax.ad_checkpoint.print_saved_residuals(scaled, 2.0)
    saved = capsys.readouterr().out
    for leaf in jax.tree.leaves(w):
        shape = ",".join(map(str, leaf.shape))
        assert f"f32[{shape}] named 'w'" in saved
