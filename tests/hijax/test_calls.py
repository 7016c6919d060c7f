"""Checkpoints, custom derivatives, sharding, export and callbacks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
def test_a_checkpoint_has_gradients_of_a_weight(jit, x, weight, high, agree_by_leaves):
    inner = jax.checkpoint(lambda w: jnp.sum(jnp.sin(jnp.dot(x, w))))
    transform = (lambda f: jax.jit(jax.grad(f))) if jit else jax.grad
    found = transform(lambda w: inner(high(w)))(weight.value)
    agree_by_leaves(found, weight.reference(jax.grad, lambda w: jnp.sum(jnp.sin(x @ w))))


def test_a_scan_in_a_checkpoint_has_gradients(x, weight, high, agree_by_leaves):
    def steps(w):
        each = lambda c, x: (c + jnp.sum(jnp.sin(jnp.dot(x, w))), None)
        return jax.lax.scan(each, 0.0, jnp.stack([x, 2 * x]))[0]

    found = jax.jit(jax.grad(lambda w: jax.checkpoint(steps)(high(w))))(weight.value)
    agree_by_leaves(found, weight.reference(jax.grad, steps))


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
def test_a_checkpoint_returns_a_typed_value(jit, x, weight, high, agree, agree_by_leaves):
    inner = jax.checkpoint(lambda w: jnp.transpose(high(w)))
    agree((jax.jit(inner) if jit else inner)(weight.value), weight.dense.T)
    loss = lambda w: jnp.sum(jnp.sin(jnp.dot(x, inner(high(w)).T)))
    transform = (lambda f: jax.jit(jax.grad(f))) if jit else jax.grad
    expected = weight.reference(jax.grad, lambda w: jnp.sum(jnp.sin(x @ w)))
    agree_by_leaves(transform(loss)(weight.value), expected)


def test_a_converted_closure_returns_an_implicit_array(weight, high, agree):
    transpose = lambda w: {"w": jnp.transpose(high(w))}
    converted, constants = jax.closure_convert(transpose, weight.value)
    out = converted(weight.value, *constants)
    assert jax.tree.structure(out) == jax.tree.structure(transpose(weight.value))
    agree(out["w"], weight.dense.T)


@jax.custom_jvp
def doubled(x, w):
    return jnp.dot(x, w)


@doubled.defjvp
def _(primals, tangents):
    return doubled(*primals), 2 * jnp.dot(tangents[0], primals[1])


@jax.custom_vjp
def tripled(x, w):
    return jnp.dot(x, w)


tripled.defvjp(
    lambda x, w: (tripled(x, w), w), lambda w, ct: (3 * jnp.dot(ct, jnp.transpose(w)), None)
)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("typed", [False, True], ids=["argument", "typed"])
@pytest.mark.parametrize(("function", "factor"), [(doubled, 2), (tripled, 3)])
def test_custom_derivatives_use_the_rules(function, factor, typed, jit, x, weight, high, agree):
    see = high if typed else lambda w: w
    loss = lambda x, w: jnp.sum(function(x, see(w)))
    grad = jax.jit(jax.grad(loss)) if jit else jax.grad(loss)
    agree(loss(x, weight.value), jnp.sum(x @ weight.dense))
    agree(grad(x, weight.value), factor * jax.grad(lambda x: jnp.sum(x @ weight.dense))(x))


def mesh():
    return jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def test_a_jit_takes_a_sharded_weight(x, weight, high, agree):
    everywhere = NamedSharding(mesh(), P())
    program = lambda x, w: jnp.dot(x, high(w))
    agree(jax.jit(program)(x, jax.device_put(weight.value, everywhere)), x @ weight.dense)
    agree(jax.jit(program, in_shardings=everywhere)(x, weight.value), x @ weight.dense)


def test_shard_map_takes_a_weight(x, weight, high, agree):
    program = lambda x, w: jnp.dot(x, high(w))
    mapped = jax.shard_map(program, mesh=mesh(), in_specs=(P("d"), P()), out_specs=P("d"))
    agree(jax.jit(mapped)(x, weight.value), x @ weight.dense)


def test_a_function_can_be_compiled_ahead_of_time(x, weight, high, agree):
    program = jax.jit(lambda x, w: jnp.dot(x, high(w)))
    agree(program.lower(x, weight.value).compile()(x, weight.value), x @ weight.dense)
    assert program.eval_shape(x, weight.value) == jax.ShapeDtypeStruct((3, 6), jnp.float32)


def test_an_exported_function_can_be_called(x, weight, high, agree):
    exported = jax.export.export(jax.jit(lambda x, w: jnp.dot(x, high(w))))(x, weight.value)
    loaded = jax.export.deserialize(exported.serialize())
    agree(loaded.call(x, weight.value), x @ weight.dense)


def test_callbacks_receive_the_dense_array(weight, high, agree):
    seen = []
    jax.jit(lambda w: jax.debug.callback(seen.append, high(w)))(weight.value)
    jax.effects_barrier()
    agree(np.asarray(seen[0]), weight.dense)
