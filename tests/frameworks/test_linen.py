"""Layers of flax.linen with implicit arrays in their dict of parameters."""

import functools

import flax.errors
import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training.train_state import TrainState
from support import arrays
from support.array_types import assert_close
from support.implicit_weights import cases, lora, nf4, qlora
from support.policies import only_by_rules

import veneer as vn

X = arrays.normal(2, 5, 8, seed=1)

# A layer, and the number of input axes of each kernel.
LAYERS = {
    "Dense": (nn.Dense(6), {"kernel": 1}),
    "LayerNorm": (nn.LayerNorm(), {"scale": 1}),
    "MultiHeadDotProductAttention": (
        nn.MultiHeadDotProductAttention(num_heads=2),
        {"query.kernel": 1, "key.kernel": 1, "value.kernel": 1, "out.kernel": 2},
    ),
    "Conv": (nn.Conv(4, (3,)), {"kernel": 2}),
}


def with_implicit(params, kernels, make):
    def swapped(path, w):
        name = vn.tree.path_string(path).removeprefix("params.")
        return make(w, kernels[name]) if name in kernels else w

    return jax.tree.map_with_path(swapped, params)


@pytest.fixture(params=cases(LAYERS))
def case(request):
    """Return a layer and its parameters with implicit kernels."""
    name, make = request.param
    layer, kernels = LAYERS[name]
    params = layer.init(jax.random.key(0), X)
    return layer, with_implicit(params, kernels, make)


WAYS = {
    "implicit": lambda apply: vn.implicit(apply),
    "jit of implicit": lambda apply: jax.jit(vn.implicit(apply)),
    "implicit of jit": lambda apply: vn.implicit(jax.jit(apply)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_agrees_with_dense_parameters(case, way):
    layer, params = case
    found = WAYS[way](layer.apply)(params, X)
    assert_close(found, layer.apply(vn.materialise(params), X))


@pytest.mark.parametrize("case", cases(["Dense", "MultiHeadDotProductAttention"]), indirect=True)
def test_a_kernel_in_a_product_is_not_materialized(case):
    layer, params = case
    vn.implicit(layer.apply, on_materialise=only_by_rules)(params, X)


def test_high_types_take_parameters_without_implicit(case):
    layer, params = case
    expected = layer.apply(vn.materialise(params), X)
    with vn.hijax.enabled():
        assert_close(layer.apply(params, X), expected)
        assert_close(jax.jit(layer.apply)(params, X), expected)
        assert_close(vn.implicit(layer.apply)(params, X), expected)


def test_high_types_give_a_dense_gradient_of_a_quantized_kernel():
    layer, kernels = LAYERS["Dense"]
    params = with_implicit(layer.init(jax.random.key(0), X), kernels, nf4)
    loss = lambda params: jnp.sin(layer.apply(params, X)).sum()
    with vn.hijax.enabled():
        gradient = jax.jit(jax.grad(loss))(params)
    expected = jax.grad(loss)(vn.materialise(params))
    assert jax.tree.all(jax.tree.map(jnp.allclose, gradient, expected))


def test_a_layer_without_implicit_raises():
    layer, kernels = LAYERS["Dense"]
    params = with_implicit(layer.init(jax.random.key(0), X), kernels, lora)
    with pytest.raises(
        RuntimeError, match=r"LoraArray:f32\[8,6\] outside vn\.implicit.*module\.apply"
    ):
        layer.apply(params, X)


def test_a_bound_module_agrees_with_dense_parameters():
    layer, kernels = LAYERS["Dense"]
    params = with_implicit(layer.init(jax.random.key(0), X), kernels, qlora)
    found = vn.implicit(lambda params: layer.bind(params)(X))(params)
    assert_close(found, layer.apply(vn.materialise(params), X))


def test_gradients_by_leaves_follow_the_dense_gradient():
    layer, kernels = LAYERS["Dense"]
    params = with_implicit(layer.init(jax.random.key(0), X), kernels, lora)
    loss = lambda params: jnp.sin(layer.apply(params, X)).sum()
    dense = jax.grad(loss)(vn.materialise(params))["params"]["kernel"]
    by_leaves = jax.grad(vn.implicit(loss))(params)["params"]["kernel"]
    assert_close(vn.implicit(jax.grad(loss))(params)["params"]["kernel"], dense)
    w = params["params"]["kernel"]
    assert_close(by_leaves.a, w.scale * dense @ w.b.T)
    assert_close(by_leaves.b, w.scale * w.a.T @ dense)


def test_a_train_state_updates_only_trainable_leaves():
    layer, kernels = LAYERS["Dense"]
    params = with_implicit(layer.init(jax.random.key(0), X), kernels, qlora)
    trained, frozen = vn.tree.partition(params, vn.trainable(params))
    state = TrainState.create(apply_fn=layer.apply, params=trained, tx=optax.adam(0.05))

    @jax.jit
    def step(state, frozen):
        def loss(trained):
            out = vn.implicit(state.apply_fn)(vn.tree.combine(trained, frozen), X)
            return jnp.sin(out).sum()

        value, gradient = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=gradient), value

    values = []
    for _ in range(5):
        state, value = step(state, frozen)
        values.append(value)
    assert values == sorted(values, reverse=True)
    kernel = vn.tree.combine(state.params, frozen)["params"]["kernel"]
    assert (kernel.w.packed == params["params"]["kernel"].w.packed).all()


PARAMS = {}


@pytest.mark.parametrize("make", [nf4, qlora], ids=["nf4", "qlora"])
def test_a_captured_dict_of_parameters_is_found_or_raises(make):
    layer, kernels = LAYERS["Dense"]
    PARAMS.update(with_implicit(layer.init(jax.random.key(0), X), kernels, make))
    product = lambda x: jnp.dot(x, PARAMS["params"]["kernel"])
    expected = jnp.dot(X, vn.materialise(PARAMS)["params"]["kernel"])
    assert_close(jax.jit(vn.implicit(product))(X), expected)
    with pytest.raises(RuntimeError, match=r"pass the array as an argument"):
        vn.implicit(product)(X)
    with vn.hijax.enabled():
        assert_close(jax.jit(product)(X), expected)
        of_layer = jax.jit(lambda x: layer.apply(PARAMS, x))(X)
    assert_close(of_layer, layer.apply(vn.materialise(PARAMS), X))


def test_a_train_state_can_be_closed_over():
    layer, kernels = LAYERS["Dense"]
    params = with_implicit(layer.init(jax.random.key(0), X), kernels, qlora)
    trained, frozen = vn.tree.partition(params, vn.trainable(params))
    state = TrainState.create(apply_fn=layer.apply, params=trained, tx=optax.adam(0.05))
    expected = layer.apply(vn.materialise(params), X)

    def loss(params):
        return state.apply_fn(params, X)

    def of_trained(trained):
        return state.apply_fn(vn.tree.combine(trained, frozen), X)

    whole = vn.tree.combine(state.params, frozen)
    for jit in (lambda f: f, jax.jit):
        assert_close(jit(vn.implicit(loss))(whole), expected)
        assert_close(jit(lambda state: vn.implicit(loss)(whole))(state), expected)
        with vn.hijax.enabled():
            assert_close(jit(of_trained)(state.params), expected)


def test_a_batch_norm_returns_its_statistics():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=False)(nn.Dense(6)(x))

    net = Net()
    variables = net.init(jax.random.key(0), X)
    variables = with_implicit(variables, {"Dense_0.kernel": 1}, qlora)
    apply = lambda variables: net.apply(variables, X, mutable=["batch_stats"])
    found, expected = vn.implicit(apply)(variables), apply(vn.materialise(variables))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_close(one, other)


def test_the_trained_leaves_are_saved_by_flax_under_their_paths():
    layer, kernels = LAYERS["Dense"]
    params = with_implicit(layer.init(jax.random.key(0), X), kernels, lora)
    flat = {vn.tree.path_string(p): x for p, x in jax.tree.leaves_with_path(params)}
    read = flax.serialization.from_bytes(flat, flax.serialization.to_bytes(flat))
    back = jax.tree.map_with_path(lambda p, x: read[vn.tree.path_string(p)], params)
    assert jax.tree.structure(back) == jax.tree.structure(params)
    assert (back["params"]["kernel"].a == params["params"]["kernel"].a).all()


DENSE = nn.Dense(4)
DENSE_PARAMS = {"kernel": arrays.ones((8, 4), "f4"), "bias": arrays.zeros(4, "f4")}
RULE, ADAPTER = vn.quant.Rule("kernel", "int8"), vn.lora.Rule("kernel", 2)
TRACE = {
    "quantize_tree": functools.partial(vn.quant.quantize_tree, DENSE_PARAMS, [RULE], args=(X,)),
    "calibrate": lambda model: vn.quant.calibrate(model, "int8", params=DENSE_PARAMS)([X]),
    "init_tree": functools.partial(
        vn.lora.init_tree, DENSE_PARAMS, [ADAPTER], key=arrays.key(0), args=(X,)
    ),
}


@pytest.mark.parametrize("trace", TRACE.values(), ids=TRACE)
@pytest.mark.parametrize("model", [DENSE, DENSE.apply], ids=["module", "apply"])
def test_flax_linen_needs_all_variables_and_apply(trace, model):
    with pytest.raises(flax.errors.FlaxError) as error:
        trace(model=model)
    notes = " ".join(error.value.__notes__)
    assert "pass all its variables, and model=module.apply" in notes
    assert "vmap" not in notes
