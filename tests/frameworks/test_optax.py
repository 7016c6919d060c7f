"""optax trains the arrays that `vn.trainable` selects in a tree with implicit arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import arrays

import veneer as vn
from veneer.types.lora import LoraArray

KEY = arrays.key(0)
RANDOM = np.random.default_rng(0)
NUMBERS = RANDOM.normal(size=(16, 8))
X = arrays.array(NUMBERS)
DENSE = arrays.array(RANDOM.normal(size=(8, 4)) / 3)
TARGET = arrays.array(np.tanh(NUMBERS @ RANDOM.normal(size=(8, 4))))
NF4 = arrays.quantized("nf4", 8, 4, tile=4)


def params_of(w):
    kernel = LoraArray.init(w, 2, key=KEY, alpha=4.0)
    return {"kernel": kernel, "bias": jnp.zeros(4)}


def loss(params, x=X):
    return jnp.square(jnp.tanh(x @ params["kernel"] + params["bias"]) - TARGET).mean()


def trained_with(tx, params, loss, steps=4):
    """Train for some steps. Return the trained partition and the optimizer's state."""
    trained, frozen = vn.tree.partition(params, vn.trainable(params))

    @jax.jit
    def step(trained, state):
        of_trained = lambda trained: vn.implicit(loss)(vn.tree.combine(trained, frozen))
        updates, state = tx.update(jax.grad(of_trained)(trained), state, trained)
        return optax.apply_updates(trained, updates), state

    state = tx.init(trained)
    for _ in range(steps):
        trained, state = step(trained, state)
    return trained, state


def reference(tx, base, steps=4):
    """Train a program with a handwritten low-rank update. Return its arrays."""
    kernel = params_of(DENSE)["kernel"]
    leaves = {"a": kernel.a, "b": kernel.b, "bias": jnp.zeros(4)}

    def written_out(leaves):
        weight = base + kernel.scale * leaves["a"] @ leaves["b"]
        return loss({"kernel": weight, "bias": leaves["bias"]})

    state = tx.init(leaves)
    for _ in range(steps):
        updates, state = tx.update(jax.grad(written_out)(leaves), state, leaves)
        leaves = optax.apply_updates(leaves, updates)
    return leaves


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 8)
OPTIMIZERS = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "adamw, clipped, scheduled": optax.chain(
        optax.clip_by_global_norm(0.1), optax.adamw(SCHEDULE, weight_decay=0.1)
    ),
    "lion": optax.lion(0.01),
}


@pytest.mark.parametrize("base", [DENSE, NF4], ids=["lora", "qlora"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_agree_with_a_handwritten_lora(name, base):
    tx = OPTIMIZERS[name]
    trained, _ = trained_with(tx, params_of(base), loss)
    expected = reference(tx, vn.materialise(base))
    found = {"a": trained["kernel"].a, "b": trained["kernel"].b, "bias": trained["bias"]}
    for key, value in expected.items():
        assert not jnp.allclose(value, reference(tx, vn.materialise(base), steps=1)[key], atol=1e-6)
        # Adam divides by the root of a second moment, which magnifies rounding.
        assert jnp.allclose(found[key], value, rtol=1e-3, atol=1e-4), key


def test_the_state_has_moments_only_of_trained_leaves():
    _, state = trained_with(optax.adam(0.1), params_of(NF4), loss)
    moments = [x.shape for x in jax.tree.leaves(state) if x.ndim]
    assert sorted(moments) == sorted(2 * [(8, 2), (2, 4), (4,)])


def test_the_loss_falls_and_combine_restores_the_tree():
    params = params_of(NF4)
    trained, _ = trained_with(optax.adam(0.1), params, loss, steps=30)
    whole = vn.tree.combine(trained, vn.tree.partition(params, vn.trainable(params))[1])
    assert jax.tree.structure(whole) == jax.tree.structure(params)
    assert (whole["kernel"].w.packed == NF4.packed).all()
    assert loss(whole) < 0.5 * loss(params)


def test_the_global_norm_covers_only_the_trained_leaves():
    trained, _ = vn.tree.partition(params_of(NF4), vn.trainable(params_of(NF4)))
    leaves = [trained["kernel"].a, trained["kernel"].b, trained["bias"]]
    expected = jnp.sqrt(sum(jnp.square(x).sum() for x in leaves))
    assert jnp.allclose(optax.tree.norm(trained), expected)


def test_weight_decay_is_masked_by_a_tree_of_bools():
    params = params_of(NF4)
    trained, _ = vn.tree.partition(params, vn.trainable(params))
    decay = optax.add_decayed_weights(0.5, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p))
    zeros = jax.tree.map(jnp.zeros_like, trained)
    updates, _ = decay.update(zeros, decay.init(trained), trained)
    assert (updates["kernel"].a == 0.5 * trained["kernel"].a).all()
    assert (updates["bias"] == 0).all()


def test_a_and_b_can_have_different_learning_rates():
    params = params_of(NF4)
    trained, _ = vn.tree.partition(params, vn.trainable(params))
    last = lambda path, _: "b" if vn.tree.path_string(path).endswith("kernel.b") else "rest"
    labels = jax.tree.map_with_path(last, trained)
    tx = optax.multi_transform({"b": optax.sgd(16.0), "rest": optax.sgd(1.0)}, labels)
    ones = jax.tree.map(jnp.ones_like, trained)
    updates, _ = tx.update(ones, tx.init(trained), trained)
    assert (updates["kernel"].b == -16).all()
    assert (updates["kernel"].a == -1).all()
    assert (updates["bias"] == -1).all()


def freezing(mask):
    labels = jax.tree.map(lambda chosen: "train" if chosen else "freeze", mask)
    return optax.multi_transform({"train": optax.adam(0.1), "freeze": optax.set_to_zero()}, labels)


def masking(mask):
    frozen = jax.tree.map(lambda chosen: not chosen, mask)
    return optax.chain(
        optax.masked(optax.adam(0.1), mask), optax.masked(optax.set_to_zero(), frozen)
    )


@pytest.mark.parametrize("make", [freezing, masking], ids=["multi_transform", "masked"])
def test_a_mask_can_replace_a_partition(make):
    params = params_of(DENSE)
    tx = make(vn.trainable(params))
    updates, _ = tx.update(jax.grad(loss)(params), tx.init(params), params)
    new = optax.apply_updates(params, updates)
    assert (new["kernel"].w == DENSE).all()
    expected, _ = trained_with(optax.adam(0.1), params, loss, steps=1)
    for part in ("a", "b"):
        assert jnp.allclose(getattr(new["kernel"], part), getattr(expected["kernel"], part))


def test_optimizers_report_that_codes_have_no_gradient():
    params = params_of(NF4)
    gradient = jax.grad(vn.implicit(loss), allow_int=True)(params)
    assert gradient["kernel"].w.packed.dtype == jax.dtypes.float0
    tx = optax.sgd(0.1)
    with pytest.raises(TypeError):
        tx.update(gradient, tx.init(params), params)


def test_partitions_can_be_combined_inside_implicit():
    trained, frozen = vn.tree.partition(params_of(NF4), vn.trainable(params_of(NF4)))
    found = jax.grad(vn.implicit(lambda trained: loss(vn.tree.combine(trained, frozen))))(trained)
    of_whole = lambda trained: vn.implicit(loss)(vn.tree.combine(trained, frozen))
    assert jax.tree.all(jax.tree.map(jnp.allclose, found, jax.grad(of_whole)(trained)))
