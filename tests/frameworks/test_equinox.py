"""Equinox layers with implicit weights, set by `eqx.tree_at`."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from support import arrays
from support.array_types import assert_close
from support.implicit_weights import WEIGHTS, cases, lora, nf4, qlora
from support.policies import only_by_rules

import veneer as vn

KEY = arrays.key(0)
X = arrays.normal(5, 8)
IMAGE = arrays.normal(4, 6, 6)


def attend(layer, x):
    return layer(x, x, x)


# A layer, the names of its weights, the function that calls it, and its operand.
LAYERS = arrays.OnDemand(
    {
        "Linear": lambda: (
            eqx.nn.Linear(8, 6, key=KEY),
            lambda layer: [layer.weight],
            lambda layer, x: jax.vmap(layer)(x),
            X,
        ),
        "LayerNorm": lambda: (
            eqx.nn.LayerNorm(8),
            lambda layer: [layer.weight],
            lambda layer, x: jax.vmap(layer)(x),
            X,
        ),
        "MultiheadAttention": lambda: (
            eqx.nn.MultiheadAttention(2, 8, key=KEY),
            lambda layer: [
                getattr(layer, f"{name}_proj").weight
                for name in ("query", "key", "value", "output")
            ],
            attend,
            X,
        ),
        "Conv2d": lambda: (
            eqx.nn.Conv2d(4, 2, 3, padding=1, key=KEY),
            lambda layer: [layer.weight],
            lambda layer, x: layer(x),
            IMAGE,
        ),
    }
)


@pytest.fixture(params=cases(LAYERS))
def case(request):
    """Return a layer with implicit weights, the function that calls it, and its operand."""
    name, make = request.param
    layer, weights, call, x = LAYERS[name]
    return eqx.tree_at(weights, layer, [make(w) for w in weights(layer)]), call, x


WAYS = {
    "implicit": lambda call: vn.implicit(call),
    "filter_jit of implicit": lambda call: eqx.filter_jit(vn.implicit(call)),
    "implicit of filter_jit": lambda call: vn.implicit(eqx.filter_jit(call)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_agrees_with_dense_weights(case, way):
    layer, call, x = case
    assert_close(WAYS[way](call)(layer, x), call(vn.materialise(layer), x))


def test_a_module_can_be_made_implicit(case):
    layer, call, x = case
    assert_close(call(vn.implicit(layer), x), call(vn.materialise(layer), x))


@pytest.mark.parametrize("case", cases(["Linear", "MultiheadAttention"]), indirect=True)
def test_a_matrix_is_not_materialized(case):
    layer, call, x = case
    vn.implicit(call, on_materialise=only_by_rules)(layer, x)


def loss(layer, x):
    return jnp.sin(jax.vmap(layer)(x)).sum()


def test_the_gradient_by_leaves_is_a_module_of_the_same_type():
    layer = LAYERS["Linear"][0]
    w = lora(layer.weight)
    updated = eqx.tree_at(lambda layer: layer.weight, layer, w)
    value, gradient = eqx.filter_value_and_grad(vn.implicit(loss))(updated, X)
    of_dense = eqx.filter_grad(loss)(vn.materialise(updated), X)
    assert_close(value, loss(vn.materialise(updated), X))
    assert_close(gradient.weight.a, w.scale * of_dense.weight @ w.b.T)
    assert_close(gradient.weight.b, w.scale * w.a.T @ of_dense.weight)
    assert_close(gradient.bias, of_dense.bias)


@pytest.mark.parametrize("make", WEIGHTS)
def test_the_gradient_by_the_dense_array_is_dense(make):
    layer = eqx.tree_at(lambda layer: layer.weight, LAYERS["Linear"][0], replace_fn=make)
    gradient = vn.implicit(eqx.filter_grad(loss))(layer, X)
    assert_close(gradient.weight, eqx.filter_grad(loss)(vn.materialise(layer), X).weight)


def told_of_scales():
    return pytest.warns(UserWarning, match=r"scales of a QArray.*vn\.trainable")


@pytest.mark.parametrize("jit", [lambda f: f, eqx.filter_jit], ids=["eager", "jit"])
@pytest.mark.parametrize("make", [nf4, qlora], ids=["nf4", "qlora"])
def test_derivatives_by_scales_give_a_warning(make, jit):
    layer = eqx.tree_at(lambda layer: layer.weight, LAYERS["Linear"][0], replace_fn=make)
    with told_of_scales():
        jit(eqx.filter_grad(vn.implicit(loss)))(layer, X)
    trained, frozen = vn.tree.partition(layer, vn.trainable(layer))
    jit(eqx.filter_grad(lambda t: vn.implicit(loss)(eqx.combine(t, frozen), X)))(trained)


@pytest.mark.parametrize("jit", [lambda f: f, eqx.filter_jit], ids=["eager", "jit"])
@pytest.mark.parametrize("make", [nf4, qlora], ids=["nf4", "qlora"])
def test_high_types_give_filter_grad_a_dense_gradient(make, jit):
    layer = eqx.tree_at(lambda layer: layer.weight, LAYERS["Linear"][0], replace_fn=make)
    of_dense = eqx.filter_grad(loss)(vn.materialise(layer), X).weight
    with vn.hijax.enabled():
        value, gradient = jit(eqx.filter_value_and_grad(loss))(layer, X)
        _, pull = eqx.filter_vjp(loss, layer, X)
        by_jax = jit(jax.grad(lambda w: loss(eqx.tree_at(lambda m: m.weight, layer, w), X)))
        expected = by_jax(layer.weight)
        assert_close(value, loss(vn.materialise(layer), X))
        for found in (gradient, pull(jnp.ones(()))[0]):
            assert jax.tree.structure(found.weight) == jax.tree.structure(expected)
            assert_close(jax.tree.leaves(found.weight), jax.tree.leaves(expected))
            assert_close(found.weight if make is nf4 else found.weight.w, of_dense)
        with pytest.raises(TypeError, match="quantized weights cannot be updated"):
            jit(eqx.apply_updates)(layer, gradient)


@pytest.mark.parametrize("jit", [lambda f: f, eqx.filter_jit], ids=["eager", "jit"])
def test_an_update_by_a_dense_gradient_raises(jit):
    layer = eqx.tree_at(lambda layer: layer.weight, LAYERS["Linear"][0], replace_fn=nf4)
    gradient = vn.implicit(eqx.filter_grad(loss))(layer, X)
    with pytest.raises(TypeError, match=r"equinox.apply_updates.*QArray.*vn\.trainable"):
        jit(eqx.apply_updates)(layer, gradient)


def test_codes_have_no_gradient_and_do_not_change():
    layer = eqx.tree_at(lambda layer: layer.weight, LAYERS["Linear"][0], replace_fn=nf4)
    with told_of_scales():
        gradient = eqx.filter_grad(vn.implicit(loss))(layer, X)
    assert gradient.weight.packed is None
    new = eqx.apply_updates(layer, jax.tree.map(lambda g: -0.1 * g, gradient))
    assert (new.weight.packed == layer.weight.packed).all()
    assert (new.bias != layer.bias).any()


@pytest.mark.parametrize("jit", [lambda f: f, eqx.filter_jit], ids=["eager", "jit"])
def test_partitions_can_be_combined_inside_implicit(jit):
    layer = eqx.tree_at(lambda layer: layer.weight, LAYERS["Linear"][0], replace_fn=qlora)
    trained, frozen = vn.tree.partition(layer, vn.trainable(layer))
    of_parts = vn.implicit(lambda trained, frozen: loss(eqx.combine(trained, frozen), X))
    expected = eqx.filter_grad(lambda t: vn.implicit(loss)(eqx.combine(t, frozen), X))(trained)
    found = jit(eqx.filter_grad(of_parts))(trained, frozen)
    assert jax.tree.all(jax.tree.map(jnp.allclose, found, expected))


def test_a_layer_without_implicit_raises():
    layer, weights, call, x = LAYERS["Conv2d"]
    layer = eqx.tree_at(weights, layer, [nf4(w) for w in weights(layer)])
    with pytest.raises(RuntimeError, match=r"QArray.* outside vn\.implicit"):
        call(layer, x)


def test_a_training_loop_updates_only_trainable_leaves():
    layer = eqx.tree_at(lambda layer: layer.weight, LAYERS["Linear"][0], replace_fn=qlora)
    trained, frozen = eqx.partition(layer, vn.trainable(layer))
    tx = optax.adam(0.05)

    @eqx.filter_jit
    def step(trained, frozen, state):
        of_trained = lambda trained: vn.implicit(loss)(eqx.combine(trained, frozen), X)
        value, gradient = eqx.filter_value_and_grad(of_trained)(trained)
        updates, state = tx.update(gradient, state, trained)
        return eqx.apply_updates(trained, updates), state, value

    state = tx.init(trained)
    values = []
    for _ in range(5):
        trained, state, value = step(trained, frozen, state)
        values.append(value)
    assert values == sorted(values, reverse=True)
    new = eqx.combine(trained, frozen)
    assert eqx.tree_equal(new.weight.w, layer.weight.w)
    assert (new.weight.a != layer.weight.a).any()


def test_a_partition_by_dtype_divides_implicit_arrays():
    layer = eqx.tree_at(lambda layer: layer.weight, LAYERS["Linear"][0], replace_fn=qlora)
    floats, others = eqx.partition(layer, eqx.is_inexact_array)
    assert (floats.weight.w.packed, others.weight.a) == (None, None)
    assert eqx.tree_equal(eqx.combine(floats, others), layer)


def test_a_file_of_leaves_restores_the_module(case, tmp_path):
    layer, _, _ = case
    eqx.tree_serialise_leaves(tmp_path / "layer.eqx", layer)
    like = eqx.filter_eval_shape(lambda: layer)
    assert eqx.tree_equal(eqx.tree_deserialise_leaves(tmp_path / "layer.eqx", like), layer)


def test_a_weight_can_be_put_back():
    layer = LAYERS["Linear"][0]
    there = eqx.tree_at(lambda layer: layer.weight, layer, replace_fn=lora)
    back = eqx.tree_at(lambda layer: layer.weight, there, layer.weight)
    assert eqx.tree_equal(back, layer)


def test_an_untraceable_batch_suggests_vmap():
    layer = eqx.nn.MLP(8, 8, 64, 1, key=KEY)
    suggestion = "model=lambda m, x: jax.vmap(m)(x)"
    with pytest.raises(TypeError, match="shape") as error:
        vn.quant.quantize_tree(layer, "int8", args=(X,))
    assert suggestion in "".join(error.value.__notes__)
    rules = [vn.quant.Rule(".*weight", "int8")]
    mapped = lambda m, x: jax.vmap(m)(x)
    small = vn.quant.quantize_tree(layer, rules, model=mapped, args=(X,))
    assert isinstance(small.layers[0].weight, vn.quant.QArray)
    with pytest.raises(KeyError) as error:
        vn.quant.quantize_tree(layer, rules, model=lambda m, x: {}[x], args=("shape",))
    assert suggestion not in "".join(error.value.__notes__)
