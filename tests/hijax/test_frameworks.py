"""Models and optimizers of other libraries, with implicit weights and no decorator."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx

import veneer as vn


def quantized_adapter(shape):
    """Return a quantized weight with a LoRA adapter."""
    k, n = shape
    q = vn.quant.quantize(
        jax.random.normal(jax.random.key(0), shape), "int8", channelwise_axes=(1,)
    )
    return vn.types.LoraArray(
        q, 0.1 * jax.random.normal(jax.random.key(1), (k, 2)), jnp.zeros((2, n))
    )


def test_optax_updates_the_leaves_of_an_implicit_array(x):
    w = vn.types.LoraArray(jnp.ones((4, 6)), jnp.ones((4, 2)), jnp.ones((2, 6)))
    loss = lambda w: jnp.mean(jnp.dot(x, w) ** 2)
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(w, state):
        updates, state = optimizer.update(jax.grad(loss)(w), state)
        return optax.apply_updates(w, updates), state

    new, state = step(w, optimizer.init(w))
    new, state = step(new, state)
    assert type(new) is vn.types.LoraArray
    assert loss(new) < loss(w)


def test_an_equinox_model_trains_only_its_adapter(x):
    model = eqx.nn.MLP(4, 3, 6, 1, key=jax.random.key(0))
    where = lambda m: m.layers[0].weight
    weight = quantized_adapter((6, 4))
    model = eqx.tree_at(where, model, weight)
    loss = lambda model: jnp.mean(jax.vmap(model)(x) ** 2)
    trained, frozen = eqx.partition(model, vn.trainable(model))
    loss_of = lambda trained: loss(eqx.combine(trained, frozen))

    @eqx.filter_jit
    def step(trained):
        grads = eqx.filter_grad(loss_of)(trained)
        return eqx.apply_updates(trained, jax.tree.map(lambda g: -0.02 * g, grads))

    new = eqx.combine(step(step(trained)), frozen)
    assert loss(new) < loss(model)
    assert type(where(new)) is vn.types.LoraArray
    assert (where(new).w.qvalue == weight.w.qvalue).all()
    assert (where(new).b != weight.b).any()


@pytest.mark.parametrize("transform", [nnx.jit, lambda f: f], ids=["jitted", "eager"])
def test_an_nnx_layer_runs_with_an_implicit_kernel(transform, x, weight, agree):
    layer = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
    layer.kernel = nnx.Param(weight.value)
    agree(transform(lambda layer, x: layer(x))(layer, x), x @ weight.dense + layer.bias[...])


def test_an_nnx_layer_trains_with_an_implicit_kernel(x):
    layer = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
    layer.kernel = nnx.Param(
        vn.types.LoraArray(jnp.ones((4, 6)), jnp.ones((4, 2)), jnp.ones((2, 6)))
    )
    loss = lambda layer: jnp.mean(layer(x) ** 2)
    optimizer = nnx.Optimizer(layer, optax.sgd(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(layer, optimizer):
        value, grads = nnx.value_and_grad(loss)(layer)
        optimizer.update(layer, grads)
        return value

    losses = [step(layer, optimizer) for _ in range(3)]
    assert losses[2] < losses[1] < losses[0]
    assert type(layer.kernel[...]) is vn.types.LoraArray


def test_framework_jits_let_a_box_change_its_structure(agree):
    x = jnp.ones(2)
    for jit, model in (
        (eqx.filter_jit, eqx.nn.Linear(2, 3, key=jax.random.key(0))),
        (nnx.jit, nnx.Linear(2, 3, rngs=nnx.Rngs(0))),
    ):
        box = vn.hijax.Box()
        program = jit(lambda model, x, box=box: box.set({"y": model(x)}))
        for scale in (1.0, 2.0):
            program(model, scale * x)
            agree(box.get()["y"], model(scale * x))


def test_a_linen_parameter_can_be_quantized(agree):
    model = linen.Dense(6, use_bias=False)
    kernel = vn.quant.quantize(jnp.ones((4, 6)), "nf4")
    actual = model.apply({"params": {"kernel": kernel}}, jnp.ones((3, 4)))
    agree(actual, jnp.ones((3, 4)) @ vn.materialise(kernel))
