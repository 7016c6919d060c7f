"""Layers of flax.nnx with implicit arrays in their `nnx.Param`s."""

import contextlib

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from support import arrays
from support.array_types import assert_close
from support.implicit_weights import cases, lora, nf4, qlora
from support.policies import only_by_rules

import veneer as vn

X = arrays.normal(2, 5, 8, seed=1)


def attention():
    return nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=nnx.Rngs(0))


# The constructor of a layer, and the number of input axes of each kernel by path.
LAYERS = {
    "Linear": (lambda: nnx.Linear(8, 6, rngs=nnx.Rngs(0)), {"kernel": 1}),
    "LayerNorm": (lambda: nnx.LayerNorm(8, rngs=nnx.Rngs(0)), {"scale": 1}),
    "MultiHeadAttention": (
        attention,
        {"query.kernel": 1, "key.kernel": 1, "value.kernel": 1, "out.kernel": 2},
    ),
    "Conv": (lambda: nnx.Conv(8, 4, (3,), rngs=nnx.Rngs(0)), {"kernel": 2}),
}


def put_in(layer, kernels, make):
    """Return the layer with implicit arrays in its parameters."""
    for path, in_ndim in kernels.items():
        *parents, name = path.split(".")
        owner = layer
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, name, nnx.Param(make(getattr(owner, name)[...], in_ndim)))
    return layer


def dense(layer):
    """Return a copy of the layer with materialized parameters."""
    graph, state = nnx.split(layer)
    return nnx.merge(graph, vn.materialise(state))


@pytest.fixture(params=cases(LAYERS))
def layer(request):
    """Return a layer with implicit parameters."""
    name, make = request.param
    new, kernels = LAYERS[name]
    return put_in(new(), kernels, make)


def call(layer, x):
    return layer(x)


WAYS = {
    "implicit": vn.implicit(call),
    "implicit of the layer": lambda layer, x: vn.implicit(layer)(x),
    "nnx.jit of implicit": nnx.jit(vn.implicit(call)),
    "implicit of nnx.jit": vn.implicit(nnx.jit(call)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_agrees_with_dense_parameters(layer, way):
    assert_close(WAYS[way](layer, X), dense(layer)(X))


@pytest.mark.parametrize("layer", cases(["Linear", "MultiHeadAttention"]), indirect=True)
def test_a_kernel_in_a_product_is_not_materialized(layer):
    vn.implicit(call, on_materialise=only_by_rules)(layer, X)


def test_a_param_holds_the_implicit_array():
    layer = put_in(*new_linear(), nf4)
    assert isinstance(layer.kernel[...], vn.quant.QArray)
    assert (layer.kernel.shape, layer.kernel.dtype) == ((8, 6), jnp.float32)


def new_linear():
    new, kernels = LAYERS["Linear"]
    return new(), kernels


def test_split_and_merge_give_the_same_layer(layer):
    graph, state = nnx.split(layer)
    back = nnx.merge(graph, state)
    assert jax.tree.structure(nnx.state(back)) == jax.tree.structure(state)
    for one, other in zip(jax.tree.leaves(nnx.state(back)), jax.tree.leaves(state), strict=True):
        assert (one == other).all()
    copy = nnx.eval_shape(lambda: layer)
    nnx.update(copy, state)
    assert_close(vn.implicit(copy)(X), vn.implicit(layer)(X))


def loss(layer):
    return jnp.sin(layer(X)).sum()


def test_gradients_by_leaves_follow_the_dense_gradient():
    layer = put_in(*new_linear(), lora)
    of_dense = nnx.grad(loss)(dense(layer)).kernel[...]
    value, by_leaves = nnx.jit(nnx.value_and_grad(vn.implicit(loss)))(layer)
    assert_close(value, loss(dense(layer)))
    w, gradient = layer.kernel[...], by_leaves.kernel[...]
    assert_close(gradient.a, w.scale * of_dense @ w.b.T)
    assert_close(gradient.b, w.scale * w.a.T @ of_dense)
    assert_close(vn.implicit(nnx.grad(loss))(layer).kernel[...], of_dense)


def test_the_second_nnx_update_of_a_lora_with_adam_raises():
    # The optimizer reads its moments back as a tree of Variables, and a LoraArray has several
    # leaves instead of one. optax itself works, as in the loop below.
    layer = put_in(*new_linear(), lora)
    optimizer = nnx.Optimizer(layer, optax.adam(0.05), wrt=nnx.Param)
    gradient = nnx.grad(vn.implicit(loss))(layer)
    optimizer.update(layer, gradient)
    with pytest.raises(ValueError, match="different types at key path"):
        optimizer.update(layer, gradient)


@pytest.mark.parametrize("jit", [lambda f: f, nnx.jit], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("make", "tx"),
    [(nf4, "sgd"), (nf4, "adam"), (qlora, "sgd"), (qlora, "adam"), (lora, "adam")],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_a_rejected_nnx_update_changes_nothing_with_high_types(make, tx, jit):
    layer = put_in(*new_linear(), make)
    before = jax.tree.leaves(layer)
    optimizer = nnx.Optimizer(layer, getattr(optax, tx)(0.1), wrt=nnx.Param)

    @jit
    def step(layer, optimizer):
        optimizer.update(layer, nnx.grad(loss)(layer))

    if make is lora:  # reading its moments fails in the second update
        with vn.hijax.enabled():
            step(layer, optimizer)
        before = jax.tree.leaves(layer)
    # The TypeError names a QArray, and needs frames that checked annotations hide.
    named = r"\['kernel'\]|apply_updates: .*QArray\(nf4"
    with vn.hijax.enabled(), pytest.raises((TypeError, ValueError), match=named) as raised:
        step(layer, optimizer)
    assert "vn.tree.partition(" in str(raised.value)
    for one, other in zip(before, jax.tree.leaves(layer), strict=True):
        assert (one == other).all()


@pytest.mark.parametrize("mode", ["implicit", "high types"])
@pytest.mark.parametrize("jit", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_nnx_optimizers_without_moments_train_a_lora(jit, mode):
    layer = put_in(*new_linear(), lora)
    optimizer = nnx.Optimizer(layer, optax.sgd(0.01), wrt=nnx.Param)
    f = vn.implicit(loss) if mode == "implicit" else loss

    @jit
    def step(layer, optimizer):
        value, gradient = nnx.value_and_grad(f)(layer)
        optimizer.update(layer, gradient)
        return value

    with vn.hijax.enabled() if mode == "high types" else contextlib.nullcontext():
        values = [step(layer, optimizer) for _ in range(5)]
    assert values == sorted(values, reverse=True)
    assert isinstance(layer.kernel[...], vn.types.LoraArray)


@pytest.mark.parametrize("mode", ["implicit", "high types"])
@pytest.mark.parametrize("jit", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_nnx_optimizers_train_weights_beside_quantized_ones(jit, mode):
    layer = put_in(*new_linear(), nf4)
    is_dense = lambda path, x: isinstance(x, nnx.Param) and not isinstance(x[...], vn.ImplicitArray)
    optimizer = nnx.Optimizer(layer, optax.adam(0.1), wrt=is_dense)
    f = vn.implicit(loss) if mode == "implicit" else loss

    @jit
    def step(layer, optimizer):
        value, gradient = nnx.value_and_grad(f, argnums=nnx.DiffState(0, is_dense))(layer)
        optimizer.update(layer, gradient)
        return value

    before = layer.kernel[...]
    with vn.hijax.enabled() if mode == "high types" else contextlib.nullcontext():
        values = [step(layer, optimizer) for _ in range(5)]
    assert values == sorted(values, reverse=True)
    assert (layer.kernel[...].packed == before.packed).all()


def test_a_layer_merged_inside_a_function_is_implicit():
    layer = put_in(*new_linear(), qlora)
    graph, state = nnx.split(layer)
    trained, rest = vn.tree.partition(state, vn.trainable(state))

    def call(trained, rest):
        return nnx.merge(graph, vn.tree.combine(trained, rest))(X)

    assert_close(vn.implicit(call)(trained, rest), vn.implicit(layer)(X))
    assert_close(jax.jit(vn.implicit(call))(trained, rest), vn.implicit(layer)(X))


@pytest.mark.parametrize("make", [nf4, lora])
def test_a_layer_without_implicit_raises(make):
    layer = put_in(*new_linear(), make)
    with pytest.raises(RuntimeError, match=r"f32\[8,6\] outside vn\.implicit"):
        layer(X)


def test_a_training_loop_updates_only_trainable_leaves():
    layer = put_in(*new_linear(), qlora)
    codes = layer.kernel[...].w.packed
    graph, state = nnx.split(layer)
    trained, frozen = vn.tree.partition(state, vn.trainable(state))
    tx = optax.adam(0.05)

    @jax.jit
    def step(trained, frozen, moments):
        def of_trained(trained):
            return vn.implicit(loss)(nnx.merge(graph, vn.tree.combine(trained, frozen)))

        value, gradient = jax.value_and_grad(of_trained)(trained)
        updates, moments = tx.update(gradient, moments, trained)
        return optax.apply_updates(trained, updates), moments, value

    moments = tx.init(trained)
    values = []
    for _ in range(5):
        trained, moments, value = step(trained, frozen, moments)
        values.append(value)
    assert values == sorted(values, reverse=True)
    nnx.update(layer, vn.tree.combine(trained, frozen))
    assert (layer.kernel[...].w.packed == codes).all()
    assert_close(loss(dense(layer)), vn.implicit(loss)(layer))


class Normed(nnx.Module):
    """A layer whose calls change its state: batch statistics, and the count of a random stream."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(8, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_changed_state_is_returned_and_written_back(jit):
    layer = put_in(Normed(), {"linear.kernel": 1}, qlora)
    expected = dense(layer)

    @jit
    @vn.implicit
    def run(variables, x):
        layer = nnx.merge(graph, variables)
        return layer(x), nnx.state(layer)

    graph, variables = nnx.split(layer)
    for _ in range(2):  # the second call has another dropout mask
        out, variables = run(variables, X)
        assert_close(out, expected(X))
    nnx.update(layer, variables)
    assert_close(layer.norm.mean[...], expected.norm.mean[...])


def test_rules_match_paths_with_and_without_value():
    layer = nnx.Linear(8, 6, rngs=nnx.Rngs(0))
    for regex in ("kernel", ".*kernel", r"kernel\.value"):
        small = vn.quant.quantize_tree(layer, [vn.quant.Rule(regex, "int8")])
        assert isinstance(small.kernel[...], vn.quant.QArray)
        tuned = vn.lora.init_tree(layer, [vn.lora.Rule(regex, rank=2)], key=jax.random.key(0))
        assert isinstance(tuned.kernel[...], vn.types.LoraArray)
        mask = vn.trainable(layer, regex)
        assert jax.tree.leaves(mask) == [False, True]
        on = jax.sharding.SingleDeviceSharding(jax.devices()[1])
        placed = vn.device_put(layer, [(regex, on)])
        assert placed.kernel[...].sharding == on
    found = vn.quant.observe(layer, [vn.quant.Rule("kernel", "int8")])([jnp.ones((2, 8))])
    assert list(found) == ["kernel.value"]
