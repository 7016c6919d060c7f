"""Sharding constraints, device_put and explicit meshes, on a mesh of 2 x 4 devices."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, auto_axes, explicit_axes, reshard
from jax.sharding import PartitionSpec as P
from support.array_types import MAKERS, assert_close
from support.meshes import (
    AUTO,
    EXPLICIT,
    KEY,
    MAKE,
    TOLERANCE,
    ColumnLora,
    Stated,
    X,
    check,
    matmul,
    of_each_type,
    of_the_flat_types,
    put,
)
from support.policies import without_rule

import veneer as vn
from veneer._core.primitives.sharding import leaf_specs

# Constraints, and arrays put on devices.


def specs_of(value):
    return [leaf.sharding.spec for leaf in jax.tree.leaves(value)]


@of_each_type
@pytest.mark.parametrize("spec", [P("x", "y"), P(None, P.UNCONSTRAINED), P()], ids=str)
def test_a_constraint_keeps_the_type(spec, name):
    w = MAKE[name]()
    f = lambda w: jax.lax.with_sharding_constraint(w, NamedSharding(AUTO, spec))
    out = check(f, w)
    assert jax.tree.structure(out) == jax.tree.structure(w)


def test_a_sharding_constraint_applies_to_each_leaf():
    f = lambda w: jax.lax.with_sharding_constraint(w, NamedSharding(AUTO, P("x", "y")))
    out = jax.jit(vn.implicit(f))(MAKE["lora"]())
    assert specs_of(out) == [P("x", "y"), P("x"), P(None, "y")]
    out = jax.jit(vn.implicit(f))(MAKE["int8"]())
    assert specs_of(out) == [P("x", "y"), P(None, "y")]


def test_a_leaf_that_cannot_follow_a_constraint_stays():
    f = lambda w: jax.lax.with_sharding_constraint(w, NamedSharding(AUTO, P("x", "y")))
    w = MAKERS["lora"](KEY, (8, 8))
    assert without_rule(vn.explain(f)(w)) == []
    for one, other in zip(*map(jax.tree.leaves, (vn.implicit(f)(w), w)), strict=True):
        assert one is other


@of_the_flat_types
def test_the_cotangent_of_a_constraint(name):
    constrain = lambda w: jax.lax.with_sharding_constraint(w, NamedSharding(AUTO, P("x", "y")))
    check(jax.grad(lambda x, w: matmul(x, constrain(w)).sum(), argnums=1), X, MAKE[name]())


@of_each_type
@pytest.mark.parametrize("to", [NamedSharding(AUTO, P("x", "y")), jax.devices()[1], None], ids=str)
def test_device_put_in_a_program_keeps_the_type(to, name):
    w = MAKE[name]()
    out = check(lambda w: jax.device_put(w, to), w, ways=["eager"])
    assert type(out) is type(w)
    if to is not None:
        devices = to.device_set if isinstance(to, NamedSharding) else {to}
        assert all(leaf.devices() == devices for leaf in jax.tree.leaves(out))


def test_unreduced_specs_have_no_specs_of_leaves():
    unreduced = P(None, None, unreduced={"x"})
    assert leaf_specs(MAKE["lora"](), unreduced, AUTO.shape, lambda size, _: size) is None


def test_device_put_replicates_leaves_it_cannot_shard():
    w = MAKERS["lora"](KEY, (8, 8))
    out = vn.implicit(lambda w: jax.device_put(w, NamedSharding(AUTO, P("x"))))(w)
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(out))
    assert_close(out, w)


@of_each_type
def test_at_top_level_a_value_is_put_as_a_pytree(name):
    w = MAKE[name]()
    expected = matmul(X, vn.materialise(w))
    everywhere = NamedSharding(AUTO, P())
    put = jax.device_put(w, everywhere)
    assert type(put) is type(w)
    assert all(leaf.sharding == everywhere for leaf in jax.tree.leaves(put))
    assert_close(vn.implicit(matmul)(X, put), expected, TOLERANCE)
    jitted = jax.jit(vn.implicit(matmul), in_shardings=(None, everywhere))
    assert_close(jitted(X, w), expected, TOLERANCE)


def test_leaves_of_arguments_can_have_own_shardings():
    w = MAKE["lora"]()
    by_leaf = ColumnLora(*(NamedSharding(AUTO, spec) for spec in _COLUMNS_OF_LORA), scale=w.scale)
    put = jax.device_put(w, by_leaf)
    assert specs_of(put) == list(_COLUMNS_OF_LORA)
    assert_close(vn.implicit(matmul)(X, put), matmul(X, vn.materialise(w)), TOLERANCE)
    jitted = jax.jit(vn.implicit(matmul), in_shardings=(None, by_leaf))
    assert_close(jitted(X, w), matmul(X, vn.materialise(w)), TOLERANCE)


_COLUMNS_OF_LORA = P(None, "y"), P(), P(None, "y")


# Explicit meshes: the sharding is part of the type.


@pytest.fixture
def explicit():
    with jax.set_mesh(EXPLICIT):
        yield


def columns(w):
    return put(w, None, "y")


EXPLICIT_PROGRAMS = {
    "matmul": matmul,
    "matmul, batched": lambda x, w: jnp.einsum("bij,jk->bik", jnp.stack([x, x]), w),
    "elementwise": lambda x, w: jnp.tanh(w) * 2 + w,
    "transpose": lambda x, w: w.T,
    "reduction": lambda x, w: w.sum(0),
    "grad by x": jax.grad(lambda x, w: matmul(x, w).sum()),
    "grad by w": jax.grad(lambda x, w: matmul(x, w).sum(), argnums=1),
    "vmap": lambda x, w: jax.vmap(lambda x: x @ w)(jnp.stack([x, x])),
    "scan over a constant": lambda x, w: jax.lax.scan(
        lambda c, _: (reshard(jnp.tanh(c @ w), P("x")), None), x, None, length=2
    )[0],
    "scan with a result": lambda x, w: jax.lax.scan(lambda c, _: (c, w), 0, None, length=2)[1],
    "cond": lambda x, w: jax.lax.cond(x.sum() > 0, lambda w: w, lambda w: w, w),
    "reshard": lambda x, w: reshard(w, P("x", None)),
    "reshard, replicated": lambda x, w: reshard(w, P()),
    "constraint": lambda x, w: jax.lax.with_sharding_constraint(w, P(None, "y")),
    "shard_map with inferred specs": lambda x, w: jax.shard_map(matmul, out_specs=P("x", "y"))(
        x, w
    ),
    "auto_axes": lambda x, w: auto_axes(matmul, out_sharding=P("x", None))(x, w),
}


@of_the_flat_types
@pytest.mark.parametrize("program", EXPLICIT_PROGRAMS)
def test_products_on_an_explicit_mesh_agree_with_dense(program, name, explicit):
    f = EXPLICIT_PROGRAMS[program]
    x, w = put(X, "x"), columns(MAKE[name]())
    assert w.aval() == jax.typeof(vn.materialise(w))
    expected = jax.jit(f)(x, vn.materialise(w))
    out = jax.jit(lambda x, w: vn.materialise(vn.implicit(f)(x, w)))(x, w)
    assert_close(out, expected, TOLERANCE)
    assert jax.typeof(out) == jax.typeof(expected)


@of_each_type
@pytest.mark.parametrize("spec", [P("x", None), P(None, "x"), P()], ids=str)
def test_reshard_keeps_the_type(spec, name, explicit):
    w = columns(MAKE[name]())
    out = check(lambda w: reshard(w, spec), w, ways=["eager", "jit inside"])
    assert type(out) is type(w)


@of_each_type
def test_eager_products_on_an_explicit_mesh_agree(name, explicit):
    x, w = put(X, "x"), columns(MAKE[name]())
    check(matmul, x, w, ways=["eager"])


def test_reshard_materializes_types_it_cannot_shard(explicit):
    w = put(MAKERS["lora"](KEY, (8, 8)))
    check(lambda w: reshard(w, P("x")), w, events=("reshard",))


def test_reshard_sets_the_sharding_that_an_aval_omits(explicit):
    out = vn.implicit(lambda x: reshard(x, P("x")))(Stated(put(X, None, "y")))
    assert jax.typeof(out).sharding.spec == P("x", None)
    assert_close(out, X)


def test_explicit_axes_in_an_auto_mesh_agree_with_dense():
    with jax.set_mesh(AUTO):
        f = explicit_axes(matmul, in_sharding=(P("x"), P(None, "y")))
        for name in MAKE:
            check(f, X, MAKE[name]())
